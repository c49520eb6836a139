"""Where a router learns of its workers: a reader of a pool's fleet records, and a short memory of what it read."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from kvatlas.blocks.reuse import ReuseRules
from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.fleet.records import FleetRecord
from router_client.pricing.pool import Pool

MAX_AGE_MS = 200.0
EMPTY_GRACE_S = 10.0


class FleetReader(Protocol):
    """Reads a pool's workers; `kvatlas.fleet.store.FleetStore` is one."""

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        """Every worker of a pool by id, also those that get no requests now. Raises Unreachable."""


class StaticFleet:
    """A fleet that is given, for an index in process and for tests. `records` may be changed at any time."""

    def __init__(self, records: Mapping[str, FleetRecord]) -> None:
        self.records = dict(records)

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        return {id: record for id, record in self.records.items() if record.endpoint.pool_id == pool_id}


class LastKnown:
    """Fleet records as last read; where nothing is read, those from before, for a while: a store that came back without its
    data knows nobody until the indexers have written again, which takes them a second or two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.records: Mapping[str, FleetRecord] = {}
        self._clock = clock
        self._at = float("-inf")

    def after(self, read: Mapping[str, FleetRecord]) -> Mapping[str, FleetRecord]:
        """What to go by, now that this was read."""
        now = self._clock()
        if read or now - self._at > EMPTY_GRACE_S:
            self.records, self._at = read, now
        return self.records


class CachedFleet:
    """Keeps a pool for `max_age_ms`: records change once a second, and unpacking hundreds takes milliseconds.

    Callers that meet an old copy share one reading, which goes on when they have no more time to wait for it.
    """

    def __init__(
        self,
        reader: FleetReader,
        max_age_ms: float = MAX_AGE_MS,
        rules: ReuseRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        profile: Callable[[str], Awaitable[CostProfile]] | None = None,
    ) -> None:
        """`profile`: what prices a pool's workers; asked while the records are read."""
        self._reader = reader
        self._rules = rules
        self._max_age_s = max_age_ms / 1_000
        self._clock = clock
        self._profile = profile or _as_usual
        self._kept: dict[str, tuple[float, Pool]] = {}
        self._reading: dict[str, asyncio.Task[Pool]] = {}
        self._last: dict[str, LastKnown] = {}

    async def pool(self, pool_id: str) -> Pool:
        """The pool as it was at most `max_age_ms` ago. Raises Unreachable."""
        kept = self._kept.get(pool_id)
        if kept is not None and self._clock() - kept[0] < self._max_age_s:
            return kept[1]
        reading = self._reading.get(pool_id)
        if reading is None:
            reading = self._reading[pool_id] = asyncio.create_task(self._read(pool_id), name="kvatlas fleet records")
            reading.add_done_callback(lambda done: self._done(pool_id, done))
        return await asyncio.shield(reading)

    def last(self, pool_id: str) -> Pool | None:
        """The pool as it was last read, however long ago; None where it never was."""
        kept = self._kept.get(pool_id)
        return kept[1] if kept is not None else None

    async def close(self) -> None:
        """Stop reading."""
        readings = list(self._reading.values())
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)

    async def _read(self, pool_id: str) -> Pool:
        asked_at = self._clock()
        read, profile = await asyncio.gather(self._reader.pool(pool_id), self._profile(pool_id))
        records = self._last.setdefault(pool_id, LastKnown(self._clock)).after(read)
        pool = Pool.of(records, self._rules, profile)
        self._kept[pool_id] = (asked_at, pool)
        return pool

    def _done(self, pool_id: str, reading: asyncio.Task[Pool]) -> None:
        del self._reading[pool_id]
        if not reading.cancelled():
            reading.exception()  # looked at, also where nobody waits any more


async def _as_usual(pool_id: str) -> CostProfile:
    return EngineProfile()
