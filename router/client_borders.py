"""What clients have to prove, and what answers say to them: the settings of one router, in the application's words."""

from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from starlette.types import Scope

from kvatlas.errors import InvalidValue
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tenancy.clients_file import is_tenant_name
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.proof import Proof
from kvatlas_router.tenant_gate import permit_of

MOST_NAMED = 100
OPERATORS_TENANT = b"x-kvatlas-tenant"
"""Header of operators' calls: the tenant of a request that another program sends."""


@dataclass(frozen=True, slots=True)
class ClientBorders:
    """`proof`: of a file of clients; None: there is one tenant, and anybody is it. `exchange`: of what clients may use in a
    minute. `salts`: each tenant's requests get a cache
    salt of its own (`--salt-is-tenant`). `decisions`: whether answers have the decision header; None: those of keys that may,
    and of anybody on loopback (`near`). `operators_prove`: operators' calls need a token, so that what they say of a tenant is
    believed."""

    proof: Proof | None = None
    exchange: AllowanceExchange = field(default_factory=AllowanceExchange)
    salts: bool = False
    decisions: bool | None = None
    near: bool = True
    operators_prove: bool = False
    counters: TenancyCounters = field(default_factory=TenancyCounters)

    def status(self, tenant_id: str) -> dict[str, Any]:
        """For operators: what is proven here, and how often. `tenant_id`: of a router with one tenant."""
        named = [tenant_id] if self.proof is None else list(self.proof.clients.tenants)
        return {
            "proven": self.proof is not None,
            "tenants": named[:MOST_NAMED],
            "limits_shared": self.exchange.is_shared,
            **asdict(self.counters),
        }

    def shows_decision(self, caller: Caller) -> bool:
        """Do this caller's answers have the decision header?"""
        if self.decisions is not None:
            return self.decisions
        return self.near if caller.sees_decisions is None else caller.sees_decisions

    def caller_of_operator(self, scope: Scope) -> Caller:
        """Who asks for a choice: its name is that of its token, or its address; its tenant is that of its header, if it proves
        itself. Raises InvalidValue."""
        named = [value.decode("utf-8", "replace") for name, value in scope["headers"] if name == OPERATORS_TENANT]
        token = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not (self.operators_prove and token):
            if named:
                raise InvalidValue("the header X-KVAtlas-Tenant counts with a token alone (--control-token-file)")
            return Caller(scope["client"][0] if scope["client"] else "")
        if len(named) > 1 or not all(map(is_tenant_name, named)):
            raise InvalidValue("the header X-KVAtlas-Tenant names no tenant; expected one name")
        return Caller(f"token {sha256(token).hexdigest()[:16]}", named[0] if named else None)


def caller_of(scope: Scope) -> Caller:
    """Who sent a request to the tenants' port."""
    permit = permit_of(scope)
    return ANYBODY if permit is None else permit.caller
