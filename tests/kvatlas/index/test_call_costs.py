"""The work of a call to the store is bounded, whatever the values, by the costs that the functions themselves count.

A call that still has some of its budget takes one more step of a scan. So it costs at most its budget and one step, and a step
has at most the blocks of one bucket more than it asks for.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import RawMessage
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.redis import recount, sweep
from kvatlas.index.redis.apply_call import unpack_answer
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, connected_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "t")
K = ShardKeys(0)
OTHERS = 1_000_000
"""The first number of holders that exist only in values."""
SCAN, SCOPE_BEGIN, BLOCK, ENTRY = 8, 4, 1, 0.1
GONE, COUNTED = 0.5, 8
FOUND, OTHER = 0.3, 0.5
"""What the functions count: for both, for a sweep, for a scrub."""


async def most_blocks_a_step(store: Store) -> int:
    """Number of blocks in the fullest bucket: a step of a scan returns a whole bucket, and the server's hash fills them at
    random."""
    cursor, page = await store.client.hscan(K.blocks(SCOPE.scope_id), 0, count=1)
    most = len(page)
    while cursor:
        cursor, page = await store.client.hscan(K.blocks(SCOPE.scope_id), cursor, count=1)
        most = max(most, len(page))
    return most


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_store, wait=False) as opened:
        yield opened


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, partitions=1, shards=1, writer=True)


def value_of(*, first: int, entries: int) -> bytes:
    """A holders value with this many entries of others."""
    return b"".join(number_bytes(number) + bytes([Tier.HBM.flag]) for number in range(first, first + entries))


async def lengthen_values(store: Store, hashes: bytes, entries: int) -> None:
    """Add this many other holders to every value; no two values are equal."""
    keys = split(hashes)
    values = await store.client.hmget(K.blocks(SCOPE.scope_id), keys)
    longer = [value + value_of(first=OTHERS + at, entries=entries) for at, value in enumerate(values)]
    await store.client.hset(K.blocks(SCOPE.scope_id), mapping=dict(zip(keys, longer, strict=True)))


async def test_a_sweep_looks_at_as_many_blocks_as_their_values_allow(
    index: RedisIndex, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, source = pack_hashes(range(1, 201)), MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, hashes))
    await lengthen_values(store, hashes, 1_000)
    await lengthen_values(store, hashes[:HASH_BYTES], 3_000)
    await index.retire("w", 1)
    costs: list[int] = []
    call = IndexFunctions.call

    async def noting(self: IndexFunctions, function: str, *what: Any) -> Any:
        answer = await call(self, function, *what)
        if function == "kvatlas_sweep":
            costs.append(answer[-1])
        return answer

    monkeypatch.setattr(IndexFunctions, "call", noting)
    together = await most_blocks_a_step(store)
    while await index.sweep(0, 1):
        pass
    block, long_block = (BLOCK + ENTRY * (entries + 1) + GONE for entries in (1_000, 4_000))
    step = SCAN + together * block + (long_block - block)
    assert len(costs) > 10 and max(costs) < sweep.CALL_COST + SCOPE_BEGIN + COUNTED + step + 1
    values = await store.client.hvals(K.blocks(SCOPE.scope_id))
    assert {len(value) for value in values} == {4 * 1_000, 4 * 4_000}


async def test_a_scrub_looks_at_as_many_blocks_as_their_values_allow(index: RedisIndex, store: Store) -> None:
    hashes, source = pack_hashes(range(1, 201)), MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, hashes))
    await lengthen_values(store, hashes, 500)
    together = await most_blocks_a_step(store)
    counted = recount.Recount(K, ["w"], [SCOPE.scope_id])
    costs, strays = [], set[bytes]()
    while not counted.ended:
        found, cost = await counted.part(IndexFunctions(store))
        costs.append(cost)
        strays.update(found.fields)
    [one] = await counted.finish(IndexFunctions(store))
    step = SCAN + together * (BLOCK + ENTRY * 501 + FOUND) + OTHER * 199  # the first block has 500 others, all have 699
    assert len(costs) > 10 and max(costs) < recount.CALL_COST + step + 1
    assert strays == set(split(hashes)) and not one.wrong


async def test_messages_of_few_blocks_with_very_long_values_are_calls_of_their_own(
    index: RedisIndex, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, first = pack_hashes(range(1, 17)), MessageSource("first")
    await apply_messages(index, first.begin(1), first.store(SCOPE, hashes))
    await lengthen_values(store, hashes, 10_000)
    calls = 0
    call = IndexFunctions.call

    async def counting(self: IndexFunctions, function: str, *what: Any) -> Any:
        nonlocal calls
        answer = await call(self, function, *what)
        calls += function == "kvatlas_apply" and unpack_answer(answer).records is not None
        return answer

    monkeypatch.setattr(IndexFunctions, "call", counting)
    messages: list[RawMessage] = []
    for number in range(8):
        source = MessageSource(f"w{number}")
        messages += [source.begin(1), source.store(SCOPE, hashes)]
    assert (await apply_messages(index, *messages)).applied == len(messages)
    assert calls >= 8
    values = await store.client.hvals(K.blocks(SCOPE.scope_id))
    assert {len(value) for value in values} == {4 * (9 + 10_000)} and len(hashes) == len(values) * HASH_BYTES
