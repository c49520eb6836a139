"""The place where a server's clients prove who they are and are held to their limits."""

import logging
from collections.abc import Iterable

from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.clients_file import Clients
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.limits import ClientLimits, OverLimit, Permit
from kvatlas_router.tenancy.proof import Proof
from kvatlas_router.tenancy.refusals import ForeignTenant, Unproven

_log = logging.getLogger("kvatlas_router.tenancy")


class Entrance:
    """The entrance of one server, for all of its protocols: a client's limits apply to all of them together. Counts and
    reports refusals."""

    def __init__(self, proof: Proof, exchange: AllowanceExchange, counters: TenancyCounters) -> None:
        self._proof = proof
        self._limits = ClientLimits(counters, exchange)
        self._counters = counters
        self._refusals = RateLimitedLog(_log)

    @property
    def clients(self) -> Clients:
        """The clients listed in the file as it is now."""
        return self._proof.clients

    async def admit(
        self, headers: Iterable[tuple[bytes, bytes]], address: str, certificate: frozenset[str] = frozenset()
    ) -> Permit:
        """Admit one request until `Permit.end`; see `Proof.prove`. Raises whatever that raises, or OverLimit."""
        return await self.admit_caller(await self.prove(headers, address, certificate))

    async def prove(
        self, headers: Iterable[tuple[bytes, bytes]], address: str, certificate: frozenset[str] = frozenset()
    ) -> Caller:
        """The sender of a request, or of a stream of requests. Raises whatever `Proof.prove` raises."""
        try:
            caller = await self._proof.prove(headers, address, certificate)
        except Unproven as error:
            self._counters.unproven += 1
            self._refusals.report("unproven", f"request of {address} refused: {error}")
            raise
        except ForeignTenant as error:
            self._counters.foreign += 1
            self._refusals.report("foreign", f"request of {address} refused: {error}")
            raise
        self._counters.proven += 1
        return caller

    def count_too_long(self, caller: Caller, line: str) -> None:
        """Count a request that is longer than its client's limit, and log why it is refused."""
        self._counters.too_long += 1
        self._refusals.report("too long", f"request of client {caller.name} refused: {line}")

    async def admit_caller(self, caller: Caller) -> Permit:
        """Admit one request of a proven sender. Raises OverLimit."""
        try:
            return await self._limits.admit(caller)
        except OverLimit:
            self._counters.over_requests += 1
            raise
