"""Lookups of many holders are split into calls that each do bounded work, and find what a walk over every block finds."""

from collections.abc import AsyncIterator

import pytest

from benchmarks.index import marks
from kvatlas.blocks.hashing import extend_chain
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.mark_lookup import SEGMENT
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import OverlapAnswer
from kvatlas.store.connection import Store, open_store

pytestmark = pytest.mark.anyio

BLOCKS = 5_000
CHAIN = extend_chain(range(BLOCKS), 1)
KEYS = ShardKeys(0)


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    store = await open_store(fresh_valkey, wait=False)
    yield store
    await store.close()


async def write_holders(store: Store, holders: int, shape: str) -> RedisIndex:
    """Active holders of different depths."""
    index = await open_redis_index(store, shards=1, writer=True)
    await marks.write_holders(store, CHAIN, holders, shape)
    names = {number_bytes(number): f"w{number}" for number in range(1, holders + 1)}
    await store.client.hset(KEYS.active, mapping=names)
    await store.client.hset(KEYS.meta, "active", "1")
    return index


async def first_answer(store: Store) -> OverlapAnswer:
    scope_id = marks.SCOPE.scope_id
    keys = [KEYS.blocks(scope_id), KEYS.meta, KEYS.marked, KEYS.marks(scope_id)]
    return OverlapAnswer(*await IndexFunctions(store).call_ro("kvatlas_overlap", keys, [CHAIN, SEGMENT, 0, BLOCKS - 1]))


@pytest.mark.parametrize("shape", ["sparse", "polluted"])
@pytest.mark.parametrize(("holders", "cut"), [(64, False), (150, False), (300, True)])
async def test_a_lookup_in_several_calls_finds_what_a_walk_finds(
    store: Store, holders: int, cut: bool, shape: str
) -> None:
    index = await write_holders(store, holders, shape)
    answer = await first_answer(store)
    assert (answer.next > 0) == cut
    assert bool(answer.left) == (holders > 64) or shape == "polluted"
    found = await index.overlap(marks.SCOPE, CHAIN, limit=BLOCKS - 1, verify=True)
    assert found.differences == ()
    assert found.depths() == {f"w{i + 1}": BLOCKS * (i + 1) // holders for i in range(holders)}
    reach = found.reach()
    assert len(reach) == holders and all(0 < reach[name] <= depth for name, depth in found.depths().items())
