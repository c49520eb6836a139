"""`route`: what a booked choice takes, how that grows with workers and blocks, and choices a second of one and four
processes: `python -m benchmarks.route`."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks.children import child_process
from benchmarks.result import Result, quantile, show
from benchmarks.route_workload import SCOPE, RouteWorkload
from kvatlas.embedded import valkey_server
from kvatlas.hashing import HASH_BYTES
from kvatlas.index.redis import open_redis_index
from kvatlas.store import Store, open_store
from router_client import Prompt, RouterClient, RouterSettings

WORKERS, BLOCKS = 64, 512
BY_WORKERS = (8, 16, 32, 64, 128, 256)
BY_BLOCKS = (64, 512, 2_048, 8_192)
CALLS = 300
WARM_UP = 30
PROCESSES = (1, 4)
SECONDS = 2.0
READY_S = 60


async def measure(store: Store, url: str) -> list[Result]:
    """The figures of 64 workers and 512 blocks."""
    results = await _latency(store, url)
    for processes in PROCESSES:
        rate = await _rate(store, url, processes)
        plural = "process" if processes == 1 else "processes"
        results.append(Result(f"route, booked and ended, {processes} {plural}", rate, "choices/s"))
    return results


async def growth(store: Store, url: str) -> list[Result]:
    """How the median grows."""
    results = []
    for workers in BY_WORKERS:
        workload = RouteWorkload(workers, BLOCKS)
        times = await _routed(store, url, workload, workload.hashed_prompt)
        results.append(Result(f"route {BLOCKS} blocks, {workers} workers, p50", quantile(times, 0.5) * 1e3, "ms"))
    for blocks in BY_BLOCKS:
        workload = RouteWorkload(WORKERS, blocks)
        for kind, prompt in (("hashes", workload.hashed_prompt), ("token ids", workload.token_prompt)):
            times = await _routed(store, url, workload, prompt)
            name = f"route {blocks:,} blocks as {kind}, {WORKERS} workers, p50"
            results.append(Result(name, quantile(times, 0.5) * 1e3, "ms"))
    return results


async def _latency(store: Store, url: str) -> list[Result]:
    workload = RouteWorkload(WORKERS, BLOCKS)
    routed = await _routed(store, url, workload, workload.hashed_prompt)
    by_tokens = await _routed(store, url, workload, workload.token_prompt)
    index = await open_redis_index(store, writer=False)
    overlaps = await _times([partial(index.overlap, SCOPE, workload.hashes()) for _ in range(CALLS)])
    trips = await _times([partial(index.overlap, SCOPE, os.urandom(HASH_BYTES)) for _ in range(CALLS)])
    results = []
    for q in (0.5, 0.99):
        overlap, trip = quantile(overlaps, q) * 1e3, quantile(trips, q) * 1e3
        name, p = f"{WORKERS} workers, {BLOCKS} blocks", f"p{q * 100:g}"
        results += [
            Result(f"overlap alone, {name}, {p}", overlap, "ms"),
            Result(f"one round trip (a miss of one block), {p}", trip, "ms"),
            Result(f"route, {name}, {p}", quantile(routed, q) * 1e3, "ms", overlap + trip),
            Result(f"route from token ids, {name}, {p}", quantile(by_tokens, q) * 1e3, "ms"),
        ]
    return results


async def _routed(store: Store, url: str, workload: RouteWorkload, prompt: Callable[[], Prompt]) -> list[float]:
    """Seconds that `book` takes, one at a time, sorted; what is booked is ended in between."""
    await workload.tell(store)
    took = []
    async with RouterClient.open(url, RouterSettings(deadline_ms=None), wait=False) as router:
        for number in range(WARM_UP + CALLS):
            asked = prompt()
            began = perf_counter()
            choice = await router.book(asked)
            if number >= WARM_UP:
                took.append(perf_counter() - began)
            await choice.finish()
    return sorted(took)


async def _times(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[float]:
    took = []
    for call in calls:
        began = perf_counter()
        await call()
        took.append(perf_counter() - began)
    return sorted(took)


async def _rate(store: Store, url: str, processes: int) -> float:
    """Choices a second of so many processes at once; each choice is booked, gets its first token, and is ended."""
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.tell(store)
    async with AsyncExitStack() as stack:
        words = [url, str(WORKERS), str(BLOCKS), str(SECONDS)]
        routers = [
            await stack.enter_async_context(child_process("benchmarks.route_router", words)) for _ in range(processes)
        ]
        await workload.tell_load(store)
        return sum(map(float, await asyncio.gather(*(router.ask(READY_S) for router in routers))))


async def _main() -> None:
    async with valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            results = await measure(store, valkey.url)
            results += await growth(store, valkey.url)
        finally:
            await store.close()
    Console(width=130).print(show(results, "route"))


if __name__ == "__main__":
    uvloop.run(_main())
