"""What an event loop measures while it is late says nothing about an engine."""

import asyncio
import gc
from time import perf_counter_ns

import pytest

from router_client import AnswerClock, Timings
from router_client.learning.loop_lateness import LoopLateness
from tests.eventually import until

pytestmark = pytest.mark.anyio

BLOCKED_NS = 60_000_000


def block_the_loop() -> None:
    """Block the loop, like a burst of requests, or a processor that is taken away."""
    until = perf_counter_ns() + BLOCKED_NS
    while perf_counter_ns() < until:
        pass


async def test_a_blocked_loop_is_late() -> None:
    lateness = LoopLateness.of_running_loop()
    assert lateness is not None and lateness is LoopLateness.of_running_loop()
    clock = AnswerClock()
    before = perf_counter_ns()
    block_the_loop()
    after = perf_counter_ns()
    assert lateness.most_ns(before, after) >= BLOCKED_NS / 2  # the due tick has not come yet
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert lateness.most_ns(before, after) >= BLOCKED_NS / 2
    assert lateness.most_ns(before - BLOCKED_NS, before) < BLOCKED_NS / 2
    del clock


async def test_times_that_a_late_loop_measured_are_left_out() -> None:
    """From a burst that kept it busy, a router once learned that one of two equal engines takes four times as long."""
    clock = AnswerClock()
    block_the_loop()
    clock.part()
    assert clock.ttft_us is not None and clock.ttft_us >= BLOCKED_NS / 1e3
    assert clock.timings(1) == Timings() == clock.first_part()


async def test_nobody_ticks_once_nobody_watches() -> None:
    lateness = LoopLateness.of_running_loop()
    assert lateness is not None
    clock = AnswerClock()
    assert lateness.ticks
    del clock
    gc.collect()
    await until(lambda: not lateness.ticks, what="no tick any more")


async def test_a_clock_outside_of_a_loop_measures() -> None:
    clock = await asyncio.to_thread(AnswerClock)
    clock.part()
    assert clock.timings(1) == Timings(clock.ttft_us)
