"""Finds out whether the store is far away."""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest

from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import connected_store
from kvatlas.store.distance import RECENT, StoreDistance
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


class Counted(StoreDistance):
    measured = 0

    def record(self, seconds: float) -> None:
        self.measured += 1
        super().record(seconds)


async def test_a_near_store_is_near_for_a_busy_router(busy_loop: None, valkey_url: str) -> None:
    async with connected_store(valkey_url, wait=False) as store:
        distance = Counted(store, every_s=0.01)
        distance.start()
        await until(lambda: distance.measured > RECENT, what="the distance is measured")
        assert not distance.is_far(10.0)
        await distance.stop()


@pytest.mark.parametrize(
    ("recent", "round_trip_s"),
    [
        ((0.08,) * RECENT, 0.08),
        ((0.08,) * (RECENT - 1), 0.0),
        ((0.08,) * (RECENT - 1) + (0.002,), 0.002),
        ((0.08,) * (RECENT - 1) + (0.0,), 0.08),
        ((-0.02, -0.001, 0.0, 0.00006, -0.3), 0.00006),
        ((0.08,) + (-0.02,) * RECENT, 0.0),
    ],
)
def test_an_answer_within_two_turns_of_the_event_loop_says_nothing(
    recent: tuple[float, ...], round_trip_s: float
) -> None:
    """Otherwise a busy loop's own time would count as the store's distance."""
    distance = StoreDistance()
    for seconds in recent:
        distance.record(seconds)
    assert distance.round_trip_s == round_trip_s
    assert distance.is_far(10.0) is (round_trip_s == 0.08)


async def test_without_descriptors_it_measures_nothing_and_goes_on_later(valkey_url: str) -> None:
    async with connected_store(valkey_url, wait=False) as store:
        distance = Counted(store, every_s=0.01)
        await asyncio.gather(*(store_time_us(store) for _ in range(3)))  # opens the connections for the calls below
        with no_descriptors_left():
            distance.start()
            for _ in range(3):
                await store_time_us(store)
            assert not distance.measured
        await until(lambda: distance.measured, what="it is measured again")
        await distance.stop()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 1, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
