"""A store that lost its last writes, or everything, under readers that go on."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.failover import dumped, restore
from tests.kvatlas.index.message_source import Teller, tell

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(4 * 8), 4)


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    opened = await open_store(fresh_store, wait=False)
    try:
        yield opened
    finally:
        await opened.close()


async def depths(index: RedisIndex) -> dict[str, int]:
    return (await index.overlap(SCOPE, CHAIN)).depths()


async def test_a_reader_never_takes_one_worker_for_another(store: Store) -> None:
    """The holders' numbers are given out again, and to others: names that were read before are not believed."""
    writer = await open_redis_index(store, writer=True)
    reader = await open_redis_index(store, writer=False)
    tellers: dict[str, Any] = {worker: Teller(worker) for worker in "abc"}
    await tell(writer, tellers["a"].begin(1), tellers["a"].store(SCOPE, CHAIN[:8]))
    before = await dumped(store)
    await tell(writer, tellers["b"].begin(1), tellers["b"].store(SCOPE, CHAIN[:16]))
    assert await depths(reader) == {"a": 1, "b": 2}
    await restore(store, before)
    await tell(writer, tellers["c"].begin(1), tellers["c"].store(SCOPE, CHAIN[:24]))
    assert await depths(reader) == {"a": 1, "c": 3}
    await restore(store, {})
    for worker in "cb":
        tellers[worker].held.clear()
        await tell(writer, tellers[worker].begin(9), tellers[worker].store(SCOPE, CHAIN[:32]))
    await tell(writer, tellers["b"].clear())
    assert await depths(reader) == {"c": 4}
