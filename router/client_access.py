"""What one router's clients must prove, and what answers reveal to them."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from starlette.types import ASGIApp, Scope

from kvatlas.addresses import is_loopback
from kvatlas.errors import InvalidValue
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.http.guard import PROVEN
from kvatlas.settings.clients import ClientSettings
from kvatlas.telemetry import export_metrics
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tenancy.clients_file import is_tenant_name
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.entrance import Entrance
from kvatlas_router.tenancy.proof import Proof
from kvatlas_router.tenant_gate import TenantGate, permit_of, proof_in

MOST_NAMED = 100
OPERATORS_TENANT = b"x-kvatlas-tenant"
"""The header in which an operator's call gives the tenant of a request that another program sends."""

_log = logging.getLogger("kvatlas_router.tenancy")


@dataclass(frozen=True, slots=True)
class ClientBorders:
    """`entrance` checks clients against the file of clients; None: all clients belong to the only tenant. `exchange`
    shares clients' per-minute allowances among routers. `salts`: each tenant's requests get their own cache salt
    (`--salt-is-tenant`). `decisions`: answers carry the decision header; None: only answers to clients whose keys may see
    it or, if clients have no keys, all answers of a router on loopback (`near`)."""

    entrance: Entrance | None = None
    exchange: AllowanceExchange = field(default_factory=AllowanceExchange)
    salts: bool = False
    decisions: bool | None = None
    near: bool = True
    counters: TenancyCounters = field(default_factory=TenancyCounters)

    def guard(self, application: ASGIApp) -> ASGIApp:
        """The application behind a gate at which clients prove their tenants; the application itself if they need not
        prove them."""
        return application if self.entrance is None else TenantGate(application, self.entrance)

    def status(self, tenant_id: str) -> dict[str, Any]:
        """Status for operators: the tenants, and how often clients have proved them. `tenant_id`: the tenant of a router
        with only one."""
        named = [tenant_id] if self.entrance is None else list(self.entrance.clients.tenants)
        return {
            "proven": self.entrance is not None,
            "tenants": named[:MOST_NAMED],
            "limits_shared": self.exchange.is_shared,
            **asdict(self.counters),
        }

    def shows_decision(self, caller: Caller) -> bool:
        """True if this caller's answers carry the decision header."""
        if self.decisions is not None:
            return self.decisions
        return self.near if caller.sees_decisions is None else caller.sees_decisions

    def shows_cached(self, caller: Caller) -> bool:
        """True if this caller's answers keep engines' counts of cached tokens: they concern only its own tenant, or it may
        see decisions."""
        return self.salts or not caller.is_proven or self.shows_decision(caller)

    async def prove_again(self, scope: Scope) -> Caller:
        """The caller of a request that has been running for a while; see `Entrance.prove`."""
        return ANYBODY if self.entrance is None else await self.entrance.prove(*proof_in(scope))

    def caller_of_operator(self, scope: Scope) -> Caller:
        """The caller of an operators' request, identified by its token or, without one, by its address. A caller with a token
        may give its tenant in a header. Raises InvalidValue if the header is invalid or is sent without a token."""
        named = [value.decode("utf-8", "replace") for name, value in scope["headers"] if name == OPERATORS_TENANT]
        token = scope.get(PROVEN)
        if token is None:
            if named:
                raise InvalidValue("the header X-KVAtlas-Tenant needs an operator's token (--control-token-file)")
            return Caller(scope["client"][0] if scope["client"] else "")
        if len(named) > 1 or not all(map(is_tenant_name, named)):
            raise InvalidValue("the header X-KVAtlas-Tenant is not a valid tenant name")
        return Caller(f"token {sha256(token).hexdigest()[:16]}", named[0] if named else None)


@asynccontextmanager
async def open_borders(
    settings: ClientSettings, fleet: FleetStore, *, salts: bool, decisions: bool | None = None
) -> AsyncIterator[ClientBorders]:
    """Open the borders of a server with these settings while it runs; see `ClientBorders` for `salts` and `decisions`. Raises
    SettingsError for an unusable file of clients."""
    proof = Proof(settings.clients_file) if settings.clients_file is not None else None
    if proof is not None:
        _log.info("clients must prove their tenants: %d clients and issuers in --clients-file", proof.clients.size)
    else:
        _log.info("every client belongs to the tenant of --tenant-id; to separate tenants, set --clients-file")
        if salts:
            _log.warning(
                "--salt-is-tenant is set without --clients-file: any client that knows a tenant's cache salt counts as that "
                "tenant; set --clients-file"
            )
    exchange, counters = AllowanceExchange(None if proof is None else fleet), TenancyCounters()
    borders = ClientBorders(
        None if proof is None else Entrance(proof, exchange, counters),
        exchange,
        salts,
        decisions,
        near=is_loopback(settings.host),
        counters=counters,
    )
    borders.exchange.start()
    try:
        with export_metrics("tenancy", borders.counters):
            yield borders
    finally:
        await borders.exchange.stop()


def caller_of(scope: Scope) -> Caller:
    """The caller of a request on the tenants' port."""
    permit = permit_of(scope)
    return ANYBODY if permit is None else permit.caller
