"""Keeps this replica's membership and leases alive; starts and stops partitions as their leases come and go.

A lease is renewed only while the messages that the replica sends to itself through NATS come back, so a replica that can't read
releases its partitions. If the store does not answer, partitions are read until their leases have expired by this replica's own
clock.
"""

import logging
from collections.abc import Callable, Sequence
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.errors import KvatlasError
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.quantities import ranges_text
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.echo import Echo
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from kvatlas_indexer.ownership.rendezvous import target_partitions

LEASE_MS = 3_000
RENEW_EVERY_S = 0.5
ACQUIRE_EVERY_S = 0.15
"""Interval between renewals while another replica holds leases that should belong to this one."""
ECHO_DEADLINE_S = 1.0
LEAVE_DEADLINE_S = 2.0

log = logging.getLogger("kvatlas.indexer")


class Membership:
    """Starts the partitions whose leases are acquired, and stops those whose leases must be released or are lost. A lease is
    released only after its partition's reader has ended."""

    def __init__(
        self,
        member_id: str,
        partitions: int,
        *,
        fleet: FleetStore,
        client: Client,
        owned: OwnedPartitions,
        counters: IndexerCounters,
    ) -> None:
        """`partitions`: the number of partitions."""
        self.member_id = member_id
        self.members: list[str] = []
        self._partitions = partitions
        self._fleet = fleet
        self._echo = Echo(client)
        self._owned = owned
        self._counters = counters
        self._held: set[int] = set()
        self._held_until_s = 0.0
        self._acquiring = False
        self._lost_members: list[str] = []
        """Members that the store has lost; they keep counting for the duration of a lease."""
        self._lost_members_until_s = 0.0

    @property
    def held(self) -> frozenset[int]:
        """The partitions whose leases this replica holds."""
        return frozenset(self._held)

    @property
    def fresh(self) -> bool:
        """True if the last renewal came in time to keep the leases."""
        return monotonic() < self._held_until_s

    async def run(self, on_settled: Callable[[], None] | None = None) -> None:
        """Run until cancelled; then stop every partition and release its lease immediately. `on_settled` is called once, after
        the first round that reached the store."""
        await self._echo.start()
        try:
            while True:
                began_s = monotonic()
                try:
                    await self._round()
                    if on_settled is not None:
                        on_settled()
                        on_settled = None
                except (KvatlasError, RedisError, NatsError, TimeoutError) as error:
                    why = str(error) or type(error).__name__
                    log.warning("member %s: leases were not renewed (%s), retrying", self.member_id, why)
                    await self._stop_expired()
                period_s = ACQUIRE_EVERY_S if self._acquiring else RENEW_EVERY_S
                await anyio.sleep(max(0.05, period_s - (monotonic() - began_s)))
        finally:
            with anyio.move_on_after(LEAVE_DEADLINE_S, shield=True):
                await self._leave()
                await self._echo.stop()

    async def _round(self) -> None:
        await self._echo.check(ECHO_DEADLINE_S)
        renewed_s = monotonic()
        if self.fresh and not await self._fleet.is_member(self.member_id):
            # a store that has lost everything knows only the first members that came back, and no partition should move because
            # of that
            self._lost_members, self._lost_members_until_s = self.members, renewed_s + LEASE_MS / 1_000
        members = await self._fleet.renew_membership(self.member_id, LEASE_MS)
        self.members = sorted({*members, *self._lost_members}) if renewed_s < self._lost_members_until_s else members
        wanted = target_partitions(self.member_id, self.members, self._partitions)
        surplus = sorted(self._held.difference(wanted))
        if surplus:
            await self._stop(surplus)
            await self._fleet.release_leases(self.member_id, surplus)
        held = set(await self._fleet.claim_leases(self.member_id, LEASE_MS, wanted))
        self._held_until_s = renewed_s + LEASE_MS / 1_000
        self._acquiring = len(held) < len(wanted)
        if lost := sorted(self._held - held):
            self._counters.leases_lost += len(lost)
            await self._stop(lost)
        if acquired := sorted(held - self._held):
            self._counters.partitions_taken += len(acquired)
            self._held |= held
            log.info(
                "member %s: started reading %d partitions (%s)", self.member_id, len(acquired), ranges_text(acquired)
            )
            self._owned.start(acquired)

    async def _stop_expired(self) -> None:
        if self._held and monotonic() >= self._held_until_s:
            self._counters.leases_lost += len(self._held)
            await self._stop(sorted(self._held))

    async def _stop(self, partitions: Sequence[int]) -> None:
        self._held.difference_update(partitions)
        self._counters.partitions_given += len(partitions)
        log.info(
            "member %s: stopped reading %d partitions (%s)", self.member_id, len(partitions), ranges_text(partitions)
        )
        await self._owned.stop(partitions)

    async def _leave(self) -> None:
        if self._held:
            await self._stop(sorted(self._held))
        try:
            await self._fleet.end_membership(self.member_id)
        except (KvatlasError, RedisError) as error:
            log.warning(
                "member %s: could not release leases (%s); they expire in %g s", self.member_id, error, LEASE_MS / 1_000
            )
