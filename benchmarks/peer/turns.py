"""What a router process of either subject measures in one turn. Uses only the standard library, because the peer's processes
import this file too."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter, process_time
from typing import TypeVar

from benchmarks.timing import quantile

Prompt = TypeVar("Prompt")
Booked = TypeVar("Booked")

WARM_UP = 30
CALLS = 300
SECONDS = 3.0
CONCURRENCY = 16
OVERLAP_CALLS = 200
PREPARED = 512
"""Prompts made before the measurement starts."""


async def time_choices(
    prompts: Iterator[Prompt], book: Callable[[Prompt], Awaitable[Booked]], finish: Callable[[Booked], Awaitable[None]]
) -> str:
    """One choice at a time: {p50_ms, p99_ms} of booking. Each is finished before the next, outside the measured time."""
    times = []
    for _ in range(WARM_UP + CALLS):
        prompt = next(prompts)
        began = perf_counter()
        booked = await book(prompt)
        times.append(perf_counter() - began)
        await finish(booked)
    times = sorted(times[WARM_UP:])
    return json.dumps({"p50_ms": quantile(times, 0.5) * 1e3, "p99_ms": quantile(times, 0.99) * 1e3})


async def count_choices(
    prompts: Iterator[Prompt], book: Callable[[Prompt], Awaitable[Booked]], finish: Callable[[Booked], Awaitable[None]]
) -> str:
    """CONCURRENCY choices at a time, as fast as possible: {choices, seconds, cpu_s}. A choice includes its end."""
    prepared = [next(prompts) for _ in range(PREPARED)]
    choices, began, cpu_began = 0, perf_counter(), process_time()

    async def route() -> None:
        nonlocal choices
        while perf_counter() - began < SECONDS:
            choices += 1
            await finish(await book(prepared[choices % PREPARED]))

    await asyncio.gather(*(route() for _ in range(CONCURRENCY)))
    seconds, cpu_s = perf_counter() - began, process_time() - cpu_began
    assert math.isfinite(seconds) and choices
    return json.dumps({"choices": choices, "seconds": seconds, "cpu_s": cpu_s})
