"""Takes retired holders out of the blocks, a little at a time. The owner of partition k sweeps shard k."""

import logging
from collections.abc import Callable, Collection

import anyio
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import ResidencyIndex

BUDGET_BLOCKS = 2_000
"""Entries a call: a few milliseconds of the store."""
PAUSE_S = 0.02
IDLE_S = 1.0

log = logging.getLogger("kvatlas.indexer")


class Sweeper:
    """One task for all shards that this replica sweeps."""

    def __init__(self, index: ResidencyIndex, counters: IndexerCounters, owned: Callable[[], Collection[int]]) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self.left: dict[int, int] = {}
        """Retired holders left by shard, as the last call said."""

    async def run(self) -> None:
        """Until cancelled; errors of the store are waited out."""
        while True:
            owned = self._owned()
            shards = [shard for shard in range(self._index.shards) if shard in owned]
            self.left = {shard: left for shard, left in self.left.items() if shard in shards}
            try:
                for shard in shards:
                    self.left[shard] = await self._index.sweep(shard, BUDGET_BLOCKS)
                    self._counters.sweeps += 1
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("retired holders are swept later: %s", error)
                await anyio.sleep(IDLE_S)
            await anyio.sleep(PAUSE_S if any(self.left.values()) else IDLE_S)
