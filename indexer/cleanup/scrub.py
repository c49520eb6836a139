"""Recounts what holders hold against their digests, slowly: finds damage that no message did.

Each replica scrubs the workers of its own partitions, since it follows those that go on meanwhile by the messages that it
applies. What is damaged is marked in its record, so it is doubted, and healed by a snapshot.
"""

import logging
from collections.abc import Callable, Collection
from time import monotonic

import anyio
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from kvatlas.errors import KvatlasError
from kvatlas.identity import shard_of
from kvatlas.index.protocol import ResidencyIndex, ScrubResult

PERIOD_S = 600.0
BUDGET_BLOCKS = 500
"""Entries a call: about a millisecond of the store."""
PAUSE_S = 0.02
"""With the budget: 25,000 entries a second, at most a twentieth of the store's time."""
LOOK_S = 1.0

log = logging.getLogger("kvatlas.indexer")


class Scrubber:
    """One task for all shards that this replica scrubs: each shard once in `period_s`, or as often as that can be."""

    def __init__(
        self,
        index: ResidencyIndex,
        counters: IndexerCounters,
        owned: Callable[[], Collection[int]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self._period_s = period_s
        self._began_s: dict[int, float] = {}
        """By shard, when its round began."""
        self._under_way: set[int] = set()

    async def run(self) -> None:
        """Until cancelled; errors of the store are waited out."""
        while True:
            try:
                busy = await self.tick(monotonic())
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("holders are recounted later: %s", error)
                busy = False
            await anyio.sleep(PAUSE_S if busy else min(LOOK_S, self._period_s))

    async def tick(self, now_s: float) -> bool:
        """One call for each shard whose round goes on or is due; is any of them under way?"""
        owned = self._owned()
        mine = sorted({shard_of(partition, self._index.shards) for partition in owned})
        self._began_s = {shard: began_s for shard, began_s in self._began_s.items() if shard in mine}
        self._under_way &= set(mine)
        for shard in mine:
            if shard not in self._under_way:
                # a shard newly taken waits a period too: its last owner may have scrubbed it just now
                if now_s - self._began_s.setdefault(shard, now_s) < self._period_s:
                    continue
                self._began_s[shard] = now_s
                self._under_way.add(shard)
            self._count(shard, await self._index.scrub(shard, BUDGET_BLOCKS, frozenset(owned)))
        return bool(self._under_way)

    def _count(self, shard: int, found: ScrubResult) -> None:
        counters = self._counters
        counters.scrub_checked += found.checked
        counters.scrub_damaged += len(found.damaged)
        counters.scrub_strays += found.strays
        counters.scrub_given_up += found.given_up
        for worker_id in found.damaged:
            log.warning("worker %s: what the index holds is not what was told; it is asked for a snapshot", worker_id)
        if found.strays:
            log.warning("shard %d: %d entries of nobody are taken out", shard, found.strays)
        if found.ended:
            counters.scrubs += 1
            self._under_way.discard(shard)
