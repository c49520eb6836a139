"""Where a router learns of its workers: a reader of a pool's fleet records, and a short memory of what it read."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kvatlas.fleet import FleetRecord
from kvatlas.reuse import ReuseRules
from router_client.pool import Pool

MAX_AGE_MS = 200.0


class FleetReader(Protocol):
    """Reads a pool's workers; `kvatlas.fleet_store.FleetStore` is one."""

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        """Every worker of a pool by id, also those that get no requests now. Raises Unreachable."""


class StaticFleet:
    """A fleet that is given, for an index in process and for tests. `records` may be changed at any time."""

    def __init__(self, records: Mapping[str, FleetRecord]) -> None:
        self.records = dict(records)

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        return {id: record for id, record in self.records.items() if record.endpoint.pool_id == pool_id}


class CachedFleet:
    """Keeps a pool for `max_age_ms`: records change once a second, and unpacking hundreds takes milliseconds.

    Callers that meet an old copy share one reading.
    """

    def __init__(
        self,
        reader: FleetReader,
        max_age_ms: float = MAX_AGE_MS,
        rules: ReuseRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._rules = rules
        self._max_age_s = max_age_ms / 1_000
        self._clock = clock
        self._kept: dict[str, tuple[float, Pool]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def pool(self, pool_id: str) -> Pool:
        """The pool as it was at most `max_age_ms` ago. Raises Unreachable."""
        if (pool := self._fresh(pool_id)) is not None:
            return pool
        async with self._locks.setdefault(pool_id, asyncio.Lock()):
            if (pool := self._fresh(pool_id)) is not None:
                return pool
            asked_at = self._clock()
            pool = Pool.of(await self._reader.pool(pool_id), self._rules)
            self._kept[pool_id] = (asked_at, pool)
            return pool

    def _fresh(self, pool_id: str) -> Pool | None:
        kept = self._kept.get(pool_id)
        return kept[1] if kept is not None and self._clock() - kept[0] < self._max_age_s else None
