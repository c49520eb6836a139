"""A store loses its last writes, or everything, while readers continue."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store, connected_store
from tests.kvatlas.index.failover import dump_all, restore
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(4 * 8), 4)


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_store, wait=False) as opened:
        yield opened


async def depths(index: RedisIndex) -> dict[str, int]:
    return (await index.overlap(SCOPE, CHAIN)).depths()


async def test_a_reader_never_takes_one_worker_for_another(store: Store) -> None:
    """Holder numbers are given out again, to other workers: names that were read before are no longer used."""
    writer = await open_redis_index(store, writer=True)
    reader = await open_redis_index(store, writer=False)
    sources: dict[str, Any] = {worker: MessageSource(worker) for worker in "abc"}
    await apply_messages(writer, sources["a"].begin(1), sources["a"].store(SCOPE, CHAIN[:8]))
    before = await dump_all(store)
    await apply_messages(writer, sources["b"].begin(1), sources["b"].store(SCOPE, CHAIN[:16]))
    assert await depths(reader) == {"a": 1, "b": 2}
    await restore(store, before)
    await apply_messages(writer, sources["c"].begin(1), sources["c"].store(SCOPE, CHAIN[:24]))
    assert await depths(reader) == {"a": 1, "c": 3}
    await restore(store, {})
    for worker in "cb":
        sources[worker].held.clear()
        await apply_messages(writer, sources[worker].begin(9), sources[worker].store(SCOPE, CHAIN[:32]))
    await apply_messages(writer, sources["b"].clear())
    assert await depths(reader) == {"c": 4}
