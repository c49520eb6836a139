"""Slowly recounts the blocks of each holder against its digest, to find damage that no message caused.

Each replica scrubs the workers of its own partitions, because the messages that it applies show it what changes during a round.
A damaged worker is marked in its record; it is then in doubt, and a snapshot repairs it.
"""

import logging
from time import monotonic

import anyio
from redis.exceptions import RedisError

from kvatlas.errors import KvatlasError
from kvatlas.identity import shard_of
from kvatlas.index.protocol import ResidencyIndex, ScrubResult
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions

PERIOD_S = 600.0
BUDGET_BLOCKS = 500
"""Entries per call, which take about a millisecond of the store's time."""
PAUSE_S = 0.02
"""Together with the budget, this allows 25,000 entries per second: at most a twentieth of the store's time."""
CHECK_EVERY_S = 1.0

log = logging.getLogger("kvatlas.indexer")


class Scrubber:
    """Scrubs the shards of the owned partitions, each once per `period_s`, or without pauses if a round takes longer than
    that."""

    def __init__(
        self,
        index: ResidencyIndex,
        counters: IndexerCounters,
        owned: OwnedPartitions,
        period_s: float = PERIOD_S,
    ) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self._period_s = period_s
        self._began_s: dict[int, float] = {}
        """When each shard's round began."""
        self._under_way: set[int] = set()

    async def run(self) -> None:
        """Scrub until cancelled. After an error from the store, the round continues later."""
        while True:
            try:
                pause_s = PAUSE_S if await self.tick(monotonic()) else min(CHECK_EVERY_S, self._period_s)
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                pause_s = min(CHECK_EVERY_S, self._period_s)
                log.warning("scrub failed (%s), retrying in %g s", error, pause_s)
            await anyio.sleep(pause_s)

    async def tick(self, now_s: float) -> bool:
        """Make one call for each shard whose round is under way or due. Returns whether a round is under way."""
        owned = self._owned.partitions
        mine = sorted({shard_of(partition, self._index.shards) for partition in owned})
        self._began_s = {shard: began_s for shard, began_s in self._began_s.items() if shard in mine}
        self._under_way &= set(mine)
        for shard in mine:
            if shard not in self._under_way:
                # a newly owned shard also waits one period, because its last owner may have just scrubbed it
                if now_s - self._began_s.setdefault(shard, now_s) < self._period_s:
                    continue
                self._began_s[shard] = now_s
                self._under_way.add(shard)
            self._count(shard, await self._index.scrub(shard, BUDGET_BLOCKS, frozenset(owned)))
        return bool(self._under_way)

    def _count(self, shard: int, found: ScrubResult) -> None:
        counters = self._counters
        counters.scrub_damaged += len(found.damaged)
        counters.scrub_strays += found.strays
        counters.scrub_given_up += found.given_up
        for worker_id in found.damaged:
            log.warning("worker %s: its blocks in the index are damaged; requesting a snapshot", worker_id)
        if found.strays:
            log.warning("shard %d: removed %d entries of unknown holders", shard, found.strays)
        if found.ended:
            counters.scrubs += 1
            self._under_way.discard(shard)
