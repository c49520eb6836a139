"""`route`: what a booked choice takes, how that grows with workers and blocks, and choices a second of one and four
processes: `python -m benchmarks.route`."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.children import child_process
from benchmarks.result import Result, quantile, show
from benchmarks.route_workload import SCOPE, RouteWorkload
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.embedded import valkey_server
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, open_store
from router_client import Prompt, RouterClient, RouterSettings

WORKERS, BLOCKS = 64, 512
BY_WORKERS = (8, 16, 32, 64, 128, 256)
BY_BLOCKS = (64, 512, 2_048, 8_192)
CALLS = 300
WARM_UP = 30
PROCESSES = (1, 4)
SECONDS = 2.0


async def measure(store: Store, url: str) -> list[Result]:
    """The figures of 64 workers and 512 blocks."""
    results = await _latency(store, url)
    for processes in PROCESSES:
        rate = await _rate(store, url, processes)
        name = f"route, booked and ended, {processes} {'process' if processes == 1 else 'processes'}"
        results += [
            Result(name, rate.choices_per_s, "choices/s"),
            Result("  processor time of the router for each", rate.router_ms, "ms"),
            Result("  processor time of the store for each", rate.store_ms, "ms"),
        ]
    return results


@dataclass(frozen=True, slots=True)
class Grown:
    """Medians for one pool and length, ms."""

    workers: int
    blocks: int
    overlap_ms: float
    route_ms: float
    by_tokens_ms: float

    @classmethod
    async def of(cls, store: Store, url: str, workers: int, blocks: int) -> "Grown":
        workload = RouteWorkload(workers, blocks)
        routed = await _routed(store, url, workload, workload.hashed_prompt)
        by_tokens = await _routed(store, url, workload, workload.token_prompt)
        overlaps = await _overlaps(store, workload)
        return cls(workers, blocks, *(quantile(times, 0.5) * 1e3 for times in (overlaps, routed, by_tokens)))


async def growth(store: Store, url: str) -> list[Table]:
    """How the medians grow with workers, and with the length of the prompt."""
    by_workers = [await Grown.of(store, url, workers, BLOCKS) for workers in BY_WORKERS]
    by_blocks = [await Grown.of(store, url, WORKERS, blocks) for blocks in BY_BLOCKS]
    return [
        _grown(f"route by workers, {BLOCKS} blocks, p50 in ms", "workers", [(row.workers, row) for row in by_workers]),
        _grown(f"route by blocks, {WORKERS} workers, p50 in ms", "blocks", [(row.blocks, row) for row in by_blocks]),
    ]


def _grown(title: str, what: str, rows: Sequence[tuple[int, Grown]]) -> Table:
    table = Table(what, "overlap alone", "route", "route from token ids", title=title)
    for number, row in rows:
        table.add_row(f"{number:,}", f"{row.overlap_ms:.2f}", f"{row.route_ms:.2f}", f"{row.by_tokens_ms:.2f}")
    return table


async def _latency(store: Store, url: str) -> list[Result]:
    workload = RouteWorkload(WORKERS, BLOCKS)
    routed = await _routed(store, url, workload, workload.hashed_prompt)
    by_tokens = await _routed(store, url, workload, workload.token_prompt)
    overlaps = await _overlaps(store, workload)
    index = await open_redis_index(store, writer=False)
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


async def _overlaps(store: Store, workload: RouteWorkload) -> list[float]:
    """Seconds that the overlap alone takes, sorted, on what the workload told before."""
    index = await open_redis_index(store, writer=False)
    return await _times([partial(index.overlap, SCOPE, workload.hashes()) for _ in range(CALLS)])


async def _times(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[float]:
    took = []
    for call in calls:
        began = perf_counter()
        await call()
        took.append(perf_counter() - began)
    return sorted(took)


@dataclass(frozen=True, slots=True)
class _Rate:
    """Choices a second, and processor time that each takes."""

    choices_per_s: float
    router_ms: float
    store_ms: float


async def _rate(store: Store, url: str, processes: int) -> _Rate:
    """Of so many processes at once; each choice is booked, gets its first token, and is ended."""
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.tell(store)
    async with AsyncExitStack() as stack:
        words = [url, str(WORKERS), str(BLOCKS), str(SECONDS)]
        routers = [
            await stack.enter_async_context(child_process("benchmarks.route_router", words)) for _ in range(processes)
        ]
        await workload.tell_load(store)
        before_s = await _store_cpu_s(store)
        told = [list(map(float, line.split())) for line in await asyncio.gather(*(one.ask() for one in routers))]
        store_s = await _store_cpu_s(store) - before_s
    ended = sum(choices for choices, _, _ in told)
    rate = sum(choices / seconds for choices, seconds, _ in told)
    return _Rate(rate, sum(worked for _, _, worked in told) * 1e3 / ended, store_s * 1e3 / ended)


async def _store_cpu_s(store: Store) -> float:
    info = await store.client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


async def _main() -> None:
    async with valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            results = await measure(store, valkey.url)
            tables = await growth(store, valkey.url)
        finally:
            await store.close()
    Console(width=130).print(show(results, "route"), *tables)


if __name__ == "__main__":
    uvloop.run(_main())
