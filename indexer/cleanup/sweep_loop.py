"""Removes the entries of retired holders, a little at a time. The owner of partition k sweeps shard k."""

import logging

import anyio
from redis.exceptions import RedisError

from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import ResidencyIndex
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions

BUDGET_BLOCKS = 2_000
"""Entries per call, which take a few milliseconds of the store's time."""
PAUSE_S = 0.02
IDLE_S = 1.0

log = logging.getLogger("kvatlas.indexer")


class Sweeper:
    def __init__(self, index: ResidencyIndex, counters: IndexerCounters, owned: OwnedPartitions) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self.left: dict[int, int] = {}
        """How many retired holders were left in each shard after the last call."""

    async def run(self) -> None:
        """Sweep until cancelled. If the store fails, the sweep continues later."""
        while True:
            shards = [shard for shard in range(self._index.shards) if shard in self._owned.partitions]
            self.left = {shard: left for shard, left in self.left.items() if shard in shards}
            try:
                for shard in shards:
                    self.left[shard] = await self._index.sweep(shard, BUDGET_BLOCKS)
                    self._counters.sweeps += 1
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("sweep failed (%s), retrying in %g s", error, IDLE_S)
                await anyio.sleep(IDLE_S)
            await anyio.sleep(PAUSE_S if any(self.left.values()) else IDLE_S)
