from collections.abc import AsyncIterator

import pytest

from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.store.connection import Store, connected_store
from tests.kvatlas.reservations.asks import Clock


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    """An empty store, of each kind."""
    async with connected_store(fresh_store, wait=False) as opened:
        yield opened
        await opened.client.function_flush()  # of a clock that only tests know


@pytest.fixture
async def clock(store: Store) -> Clock:
    clock = Clock(store)
    await clock.prepare()
    return clock


@pytest.fixture(params=["memory", "redis"])
async def reservations(request: pytest.FixtureRequest, store: Store, clock: Clock) -> Reservations:
    """No reservations yet, in each implementation, on the test's clock."""
    return MemoryReservations(clock) if request.param == "memory" else RedisReservations(store)
