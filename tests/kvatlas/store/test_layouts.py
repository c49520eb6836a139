"""A store's layouts: which one answers, what a second one takes over, and what is left after one is deleted."""

from collections.abc import AsyncIterator

import pytest

from kvatlas.errors import LayoutMismatch
from kvatlas.index.redis.layout import (
    Layout,
    delete_layout,
    make_layout,
    read_answering,
    read_layout,
    read_numbers,
    switch_layout,
)
from kvatlas.store.connection import Store, connected_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_valkey, wait=False) as opened:
        yield opened


async def test_a_further_layout_takes_the_partitions_and_the_side_index_of_the_one_that_answers(store: Store) -> None:
    assert await make_layout(store, 48, 3, True) == Layout(48, 3, True)
    assert await make_layout(store, None, 4, number=1) == Layout(48, 4, True, 1)
    assert await make_layout(store, 64, 4, number=2) == Layout(64, 4, True, 2, (48,))
    assert (await read_layout(store), await read_numbers(store)) == (Layout(48, 3, True), [0, 1, 2])
    with pytest.raises(LayoutMismatch, match="laid out with 48 partitions and 4 shards; asked for 48 and 2"):
        await make_layout(store, None, 2, number=1)


async def test_the_layout_that_answers_is_that_of_processes_without_a_number(store: Store) -> None:
    await make_layout(store, None, None)
    second = await make_layout(store, 24, 2, number=1)
    await switch_layout(store, 1)
    assert await read_layout(store) == await make_layout(store, None, None) == second
    await delete_layout(store, 0)
    assert (await read_layout(store), await read_layout(store, 0), await read_numbers(store)) == (second, None, [1])
    await switch_layout(store, 0)
    await delete_layout(store, 1)
    assert (await read_layout(store), await read_numbers(store)) == (None, [])


async def test_whichever_indexer_restores_a_wiped_store_the_same_layout_answers_again(store: Store) -> None:
    first, second = Layout(64, 1, False), Layout(24, 2, False, 1, (64,))
    for restored in ((first, second), (second, first)):
        await store.client.flushall()
        for layout in restored:
            assert await make_layout(store, *layout, answers=1) == layout
            assert await read_answering(store) == 1
        assert await read_layout(store) == second
