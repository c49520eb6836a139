"""Processes of the version before marks beside those of this one: what they refuse. They call functions of their own."""

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus import wire
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.keys import LAYOUT, LAYOUT_VERSION
from kvatlas.store.connection import open_store
from tests.kvatlas.index.message_source import MessageSource, split

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(100), 1)
PLACES = {key: (split(CHAIN)[i // 64 * 64], i % 64) for i, key in enumerate(split(CHAIN))}


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
