"""Keeps this replica a member and its leases alive, and starts and stops partitions as they come and go (thin).

A lease is renewed only while NATS echoes too: a replica that can't read gives its partitions up. Where the store does
not answer, partitions are read on until the lease is over by this replica's own clock.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from indexer.ownership.echo import Echo
from indexer.ownership.rendezvous import target_partitions
from kvatlas.errors import KvatlasError
from kvatlas.fleet.store import FleetStore

LEASE_MS = 3_000
BEAT_S = 0.5
WANTING_BEAT_S = 0.15
"""While partitions that should be this replica's are still another's."""
ECHO_DEADLINE_S = 1.0
LEAVE_DEADLINE_S = 2.0

log = logging.getLogger("kvatlas.indexer")


class Membership:
    """Calls `start` for partitions whose lease is newly held and `stop` for those that are not to be read any more.
    `stop` returns when nothing of them is read any more; only then is their lease given up."""

    def __init__(
        self,
        member_id: str,
        partitions: int,
        *,
        fleet: FleetStore,
        client: Client,
        counters: IndexerCounters,
        start: Callable[[Sequence[int]], None],
        stop: Callable[[Sequence[int]], Awaitable[None]],
    ) -> None:
        self.member_id = member_id
        self.members: list[str] = []
        self._partitions = partitions
        self._fleet = fleet
        self._echo = Echo(client)
        self._counters = counters
        self._start = start
        self._stop = stop
        self._held: set[int] = set()
        self._held_until_s = 0.0
        self._wanting = False
        self._forgotten: list[str] = []
        """Members of before the store forgot them; they count for as long as a lease lasts."""
        self._forgotten_until_s = 0.0

    @property
    def held(self) -> frozenset[int]:
        """The partitions whose leases this replica holds."""
        return frozenset(self._held)

    @property
    def fresh(self) -> bool:
        """Was the last round in time to keep the leases?"""
        return monotonic() < self._held_until_s

    async def run(self, on_settled: Callable[[], None] | None = None) -> None:
        """Until cancelled; then every partition is stopped and given up at once. `on_settled` is called once, after the
        first round that reached the store."""
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
                    log.warning("leases are not renewed: %s", str(error) or type(error).__name__)
                    await self._expire()
                beat_s = WANTING_BEAT_S if self._wanting else BEAT_S
                await anyio.sleep(max(0.05, beat_s - (monotonic() - began_s)))
        finally:
            with anyio.move_on_after(LEAVE_DEADLINE_S, shield=True):
                await self._leave()
                await self._echo.stop()

    async def _round(self) -> None:
        await self._echo.check(ECHO_DEADLINE_S)
        asked_s = monotonic()
        if self.fresh and not await self._fleet.is_member(self.member_id):
            # a store that lost everything knows only those that were quicker: nobody's partitions move for that
            self._forgotten, self._forgotten_until_s = self.members, asked_s + LEASE_MS / 1_000
        members = await self._fleet.renew_membership(self.member_id, LEASE_MS)
        self.members = sorted({*members, *self._forgotten}) if asked_s < self._forgotten_until_s else members
        wanted = target_partitions(self.member_id, self.members, self._partitions)
        surplus = sorted(self._held.difference(wanted))
        if surplus:
            await self._give(surplus)
            await self._fleet.release_leases(self.member_id, surplus)
        held = set(await self._fleet.claim_leases(self.member_id, LEASE_MS, wanted))
        self._held_until_s = asked_s + LEASE_MS / 1_000
        self._wanting = len(held) < len(wanted)
        if lost := sorted(self._held - held):
            self._counters.leases_lost += len(lost)
            await self._give(lost)
        if taken := sorted(held - self._held):
            self._counters.partitions_taken += len(taken)
            self._held |= held
            log.info("%s takes %d partitions: %s", self.member_id, len(taken), _ranges(taken))
            self._start(taken)

    async def _expire(self) -> None:
        if self._held and monotonic() >= self._held_until_s:
            self._counters.leases_lost += len(self._held)
            await self._give(sorted(self._held))

    async def _give(self, partitions: Sequence[int]) -> None:
        self._held.difference_update(partitions)
        self._counters.partitions_given += len(partitions)
        log.info("%s gives %d partitions: %s", self.member_id, len(partitions), _ranges(partitions))
        await self._stop(partitions)

    async def _leave(self) -> None:
        if self._held:
            await self._give(sorted(self._held))
        try:
            await self._fleet.end_membership(self.member_id)
        except (KvatlasError, RedisError) as error:
            log.warning("%s leaves without a word, its leases end by themselves: %s", self.member_id, error)


def _ranges(partitions: Sequence[int]) -> str:
    """`0-3,7`: ascending partitions as a person reads them."""
    spans: list[list[int]] = []
    for partition in partitions:
        if spans and spans[-1][1] == partition - 1:
            spans[-1][1] = partition
        else:
            spans.append([partition, partition])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
