"""Processes of the version before marks beside those of this one: what they call, and what they refuse."""

import msgpack
import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus import wire
from kvatlas.identity import Scope, partition_of
from kvatlas.index.protocol import PartitionBatch
from kvatlas.index.redis.apply_call import pack_call, unpack_answer
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.keys import LAYOUT, LAYOUT_VERSION, ShardKeys
from kvatlas.store.connection import open_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(100), 1)
PLACES = {key: (split(CHAIN)[i // 64 * 64], i % 64) for i, key in enumerate(split(CHAIN))}
K = ShardKeys(0)


async def test_an_indexer_without_marks_goes_on_writing_with_the_new_functions(fresh_store: str) -> None:
    store = await open_store(fresh_store, wait=False)
    try:
        index = await open_redis_index(store, writer=True)
        source = MessageSource("w")
        batch = PartitionBatch(partition_of("w", 64), [source.begin(1), source.store(SCOPE, CHAIN)])
        scope_ids, _, argument = pack_call(0, [batch])
        old = msgpack.packb(msgpack.unpackb(argument, raw=True)[:4], use_bin_type=False)
        keys = [K.workers, K.holders, K.active, K.retired, K.free, K.digests, K.touched, K.partitions, K.meta]
        keys += [K.blocks(scope_id) for scope_id in scope_ids]
        [record], counts, _ = unpack_answer(await INDEX_LIBRARY.call(store, "kvatlas_apply", keys, [old]))
        assert (counts.applied, counts.stored, record.answering) == (2, 100, True)
        assert (await index.overlap(SCOPE, CHAIN, verify=True)).depths() == {"w": 100}
    finally:
        await store.close()


async def test_a_router_without_marks_gets_the_answer_that_it_knows(fresh_store: str) -> None:
    store = await open_store(fresh_store, wait=False)
    try:
        index = await open_redis_index(store, writer=True)
        source = MessageSource("w", dropped=0, places=PLACES)
        await apply_messages(index, source.begin(1), source.store(SCOPE, CHAIN), source.mark(SCOPE, [split(CHAIN)[9]]))
        keys = [K.blocks(SCOPE.scope_id), K.meta]
        version, values, lengths = await INDEX_LIBRARY.call_ro(store, "kvatlas_overlap", keys, [CHAIN, 64])
        assert version and len(values) == 1 and lengths == [100]
        assert (await index.overlap(SCOPE, CHAIN)).reach() == {"w": 10}
    finally:
        await store.close()


async def test_the_first_indexer_raises_the_layouts_version_and_readers_take_both(fresh_store: str) -> None:
    store = await open_store(fresh_store, wait=False)
    try:
        await open_redis_index(store, writer=True)
        await store.client.hset(LAYOUT, "version", "1")
        await open_redis_index(store, writer=False)
        assert await store.client.hget(LAYOUT, "version") == b"1"
        await open_redis_index(store, writer=True)
        assert await store.client.hget(LAYOUT, "version") == str(LAYOUT_VERSION).encode()
        await open_redis_index(store, writer=False)
    finally:
        await store.close()


def test_an_indexer_without_marks_refuses_a_hybrids_snapshot_and_then_nothing_of_it_fits() -> None:
    """Version 1 takes no message of another version; what follows is a gap, so it can't show residency without marks."""
    source = MessageSource("w", dropped=0, places=PLACES)
    begin = source.begin(1)
    assert begin[wire.MESSAGE_VERSION] == wire.VERSION_WITH_MARKS
    assert source.store(SCOPE, CHAIN)[wire.SEQ] == 1
