"""The duration of a booked choice."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from secrets import token_bytes
from time import perf_counter

from benchmarks.result import Result
from benchmarks.route.workload import BLOCKS, SCOPE, WORKERS, RouteWorkload
from benchmarks.timing import quantile, time_async_calls
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.index.redis.index import open_redis_index
from kvatlas.reservations import QueueLimits, WaitingRequest
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas.store.connection import Store
from router_client import Prompt, RouterClient, RouterSettings

CALLS = 300
WARM_UP = 30


async def measure(store: Store) -> list[Result]:
    """Measure with 64 workers and prompts of 512 blocks."""
    workload = RouteWorkload(WORKERS, BLOCKS)

    def patient_prompt() -> Prompt:
        """A prompt that would wait if every worker were full."""
        prompt = workload.hashed_prompt()
        limits = QueueLimits(requests=1_000, tokens=1_000_000)
        return replace(prompt, waiting=WaitingRequest(token_bytes(ID_BYTES), "tenant", limits, prompt.input_tokens))

    from_hashes = await _time_bookings(store, workload, workload.hashed_prompt)
    patient = await _time_bookings(store, workload, patient_prompt)
    from_tokens = await _time_bookings(store, workload, workload.token_prompt)
    overlaps = await _time_overlaps(store, workload)
    index = await open_redis_index(store, writer=False)
    round_trips = await time_async_calls([partial(index.overlap, SCOPE, os.urandom(HASH_BYTES)) for _ in range(CALLS)])
    results = []
    for q in (0.5, 0.99):
        overlap, round_trip, route = (quantile(times, q) * 1e3 for times in (overlaps, round_trips, from_hashes))
        name, p = f"{WORKERS} workers, {BLOCKS} blocks", f"p{q * 100:g}"
        results += [
            Result(f"overlap alone, {name}, {p}", overlap, "ms"),
            Result(f"one round trip (a miss of one block), {p}", round_trip, "ms"),
            Result(f"route, {name}, {p}", route, "ms", overlap + round_trip),
            Result(f"route with an empty queue, {name}, {p}", quantile(patient, q) * 1e3, "ms", route + 1),
            Result(f"route from token ids, {name}, {p}", quantile(from_tokens, q) * 1e3, "ms"),
        ]
    return results


async def _time_bookings(store: Store, workload: RouteWorkload, next_prompt: Callable[[], Prompt]) -> list[float]:
    """The sorted durations of `book`, in seconds; each booking is finished before the next."""
    await workload.write(store)
    times = []
    async with RouterClient.open(store.url, RouterSettings(deadline_ms=None), wait=False) as router:
        for number in range(WARM_UP + CALLS):
            prompt = next_prompt()
            began = perf_counter()
            choice = await router.reserve(prompt)
            if number >= WARM_UP:
                times.append(perf_counter() - began)
            await choice.done()
    return sorted(times)


async def _time_overlaps(store: Store, workload: RouteWorkload) -> list[float]:
    """The sorted durations of overlaps alone, in seconds, on the workload's data."""
    index = await open_redis_index(store, writer=False)
    return await time_async_calls([partial(index.overlap, SCOPE, workload.hashes()) for _ in range(CALLS)])
