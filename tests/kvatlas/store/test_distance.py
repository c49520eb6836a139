"""Whether the store is far away."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvatlas.store.connection import connected_store
from kvatlas.store.distance import StoreDistance
from tests.eventually import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def busy_loop() -> AsyncIterator[None]:
    """An event loop in which each turn takes 20 ms."""

    async def compute() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251
            await asyncio.sleep(0)

    task = asyncio.create_task(compute())
    yield
    task.cancel()


async def test_a_near_store_is_near_for_a_busy_router(busy_loop: None, valkey_url: str) -> None:
    async with connected_store(valkey_url, wait=False) as store:
        distance = StoreDistance(store, every_s=0.01)
        distance.start()
        await until(lambda: distance.round_trip_s, what="the distance is measured")
        assert not distance.is_far(10.0)
        await distance.stop()
