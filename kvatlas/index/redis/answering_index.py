"""The index of whichever layout answers, so that a router keeps running while another layout takes over."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic

from redis.exceptions import RedisError

from kvatlas.blocks.residency import Overlap, Residency
from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.layout import layout_errors, read_layout
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store

CHECK_EVERY_S = 1.0

log = logging.getLogger("kvatlas.index")


async def open_answering_index(
    store: Store, *, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> "AnsweringIndex":
    """Open the index for reading; see `open_redis_index`."""
    return AnsweringIndex(store, await open_redis_index(store, writer=False, wait=wait, on_wait=on_wait))


class AnsweringIndex:
    """Answers overlaps and single blocks. Which layout answers is checked in the background, at most once a second. A call that
    is under way ends in the layout in which it began, which that layout's indexers still keep up to date."""

    def __init__(self, store: Store, index: RedisIndex) -> None:
        self._store = store
        self._index = index
        self._check_at_s = monotonic() + CHECK_EVERY_S
        self._check: asyncio.Task[None] | None = None
        self._log = RateLimitedLog(log)

    @property
    def shard_keys(self) -> Sequence[ShardKeys]:
        """See `RedisIndex`."""
        return self._current().shard_keys

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        return await self._current().overlap(scope, hashes, first_index=first_index, limit=limit, verify=verify)

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        return await self._current().locate(scope, sequence_hash)

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        return await self._current().children(scope, prefix_hash)

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        """See `ResidencyIndex`."""
        return await self._current().digest(worker_id)

    def _current(self) -> RedisIndex:
        if monotonic() >= self._check_at_s and (self._check is None or self._check.done()):
            self._check_at_s = monotonic() + CHECK_EVERY_S
            self._check = asyncio.create_task(self._follow(), name="kvatlas layout check")
        return self._index

    async def _follow(self) -> None:
        try:
            with layout_errors(self._store):
                layout = await read_layout(self._store)
        except (KvatlasError, RedisError) as error:
            self._log.report(
                "layout", f"the layout was not checked ({error}), still reading number {self._index.layout.number}"
            )
            return
        if layout is not None and layout != self._index.layout:
            log.info("reading layout %d now: %d partitions, %d shards", layout.number, layout.partitions, layout.shards)
            self._index = RedisIndex(self._store, layout, writer=False)
