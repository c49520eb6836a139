"""Deletes unused scopes (tenants and adapters come and go). The owner of partition 0 does this for the whole index."""

import logging

import anyio
from redis.exceptions import RedisError

from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import ResidencyIndex
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions

UNUSED_S = 600.0
"""Far longer than any call to the store: the scopes of a message that is being applied were registered a second or so ago at
most."""
CHECK_EVERY_S = 60.0
PARTITION = 0
"""The owner of this partition does the checking."""

log = logging.getLogger("kvatlas.indexer")


class ScopeExpiry:
    def __init__(
        self,
        index: ResidencyIndex,
        counters: IndexerCounters,
        owned: OwnedPartitions,
        unused_s: float = UNUSED_S,
    ) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self._unused_s = unused_s

    async def run(self) -> None:
        """Check until cancelled. If the store fails, the next check is made as usual."""
        while True:
            await anyio.sleep(CHECK_EVERY_S)
            try:
                await self.tick()
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("unused scopes were not deleted (%s), retrying in %g s", error, CHECK_EVERY_S)

    async def tick(self) -> None:
        """Delete the scopes that are currently unused."""
        while PARTITION in self._owned.partitions and (deleted := await self._index.forget_scopes(self._unused_s)):
            self._counters.scopes_forgotten += deleted
