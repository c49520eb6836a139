"""Deletes the function libraries of versions that no process runs any more. Only the owner of partition 0 does this."""

import logging
from time import monotonic

import anyio
from redis.exceptions import RedisError

from kvatlas.errors import KvatlasError
from kvatlas.store.connection import Store
from kvatlas.store.function_library import MARK_EVERY_S, FunctionLibrary, read_unmarked
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions

UNUSED_S = 6 * MARK_EVERY_S
"""How long a library must have been unmarked: a store that lost its data has no marks until processes set them again."""
CHECK_EVERY_S = MARK_EVERY_S
PARTITION = 0
"""The owner of this partition does the checking."""

log = logging.getLogger("kvatlas.indexer")


class LibraryExpiry:
    def __init__(
        self, store: Store, libraries: list[FunctionLibrary], counters: IndexerCounters, owned: OwnedPartitions
    ) -> None:
        """`libraries`: this version's libraries; only libraries of the same families are checked."""
        self._store = store
        self._families = [library.family for library in libraries]
        self._own = {library.name for library in libraries}
        self._counters = counters
        self._owned = owned
        self._unmarked_since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Check until cancelled. If the store fails, the next check is made as usual."""
        while True:
            await anyio.sleep(CHECK_EVERY_S)
            try:
                await self.tick(monotonic())
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("unused function libraries were not deleted (%s), retrying in %g s", error, CHECK_EVERY_S)

    async def tick(self, now_s: float) -> None:
        """Delete libraries that have not been marked as used for UNUSED_S, as far as this replica knows."""
        if PARTITION not in self._owned.partitions:
            self._unmarked_since_s = {}
            return
        unmarked = [name for name in await read_unmarked(self._store, self._families) if name not in self._own]
        self._unmarked_since_s = {name: self._unmarked_since_s.get(name, now_s) for name in unmarked}
        for name, since_s in self._unmarked_since_s.items():
            if now_s - since_s >= UNUSED_S:
                await self._store.delete_library(name)
                log.info("function library %s deleted: no process has used it for a day", name)
