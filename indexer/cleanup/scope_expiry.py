"""Forgets scopes that nobody uses any more: tenants and adapters come and go. The owner of partition 0 does it for all."""

import logging
from collections.abc import Callable, Collection

import anyio
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import ResidencyIndex

UNUSED_S = 600.0
"""Far longer than any call to the store takes: what is applied now was registered a second ago."""
LOOK_S = 60.0
OWNER_OF = 0

log = logging.getLogger("kvatlas.indexer")


class UnusedScopes:
    """One task of the replica that owns partition 0."""

    def __init__(
        self,
        index: ResidencyIndex,
        counters: IndexerCounters,
        owned: Callable[[], Collection[int]],
        unused_s: float = UNUSED_S,
    ) -> None:
        self._index = index
        self._counters = counters
        self._owned = owned
        self._unused_s = unused_s

    async def run(self) -> None:
        """Until cancelled; errors of the store are waited out."""
        while True:
            await anyio.sleep(LOOK_S)
            try:
                await self.tick()
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                log.warning("unused scopes are forgotten later: %s", error)

    async def tick(self) -> None:
        """Forget what is not used now."""
        while OWNER_OF in self._owned() and (gone := await self._index.forget_scopes(self._unused_s)):
            self._counters.scopes_forgotten += gone
