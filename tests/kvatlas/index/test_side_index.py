"""The side index belongs to the store's layout: all writers keep it, or none does."""

import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import LayoutMismatch, NotSupported
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store

pytestmark = pytest.mark.anyio

USE = ScopeUse(Scope("model", "tokenizer"), 4)
CHAIN = extend_chain(range(12), 4)


async def test_writers_and_readers_follow_the_layout(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store:
        await open_redis_index(store, writer=True, side_index=True)
        writer = await open_redis_index(store, writer=True)
        await writer.put(USE, "w", Tier.HBM, CHAIN)
        reader = await open_redis_index(store, writer=False)
        children = await reader.children(USE.scope, unpack_hashes(CHAIN)[0])
        assert [one.sequence_hash for one in children] == [unpack_hashes(CHAIN)[1]]
        with pytest.raises(LayoutMismatch, match="laid out with a side index; asked for one that is off: leave"):
            await open_redis_index(store, writer=True, side_index=False)


async def test_it_can_not_be_switched_on_in_a_store_whose_blocks_are_not_linked(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store:
        index = await open_redis_index(store, writer=True)
        with pytest.raises(LayoutMismatch, match="laid out without a side index; asked for one that is on: leave"):
            await open_redis_index(store, writer=True, side_index=True)
        with pytest.raises(NotSupported, match="no side index"):
            await index.children(USE.scope, None)
