"""The sync client compared with the async one: `python -m benchmarks.threads`.

It measures the time to book and finish a choice through the client's thread, and the choices per second of several
threads.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks.result import Result, tabulate
from benchmarks.route.workload import BLOCKS, WORKERS, RouteWorkload
from benchmarks.stores import valkey_store
from benchmarks.timing import quantile
from kvatlas.store.connection import Store
from router_client import RouterClient, RouterSettings, SyncRouterClient

CALLS = 500
WARM_UP = 50
THREADS = (1, 8)
SETTINGS = RouterSettings(deadline_ms=None)


async def measure(store: Store) -> list[Result]:
    """Measure both clients on the same store, one call at a time; then several threads at once."""
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.write(store)
    async_times = await asyncio.to_thread(
        asyncio.run, _time_async(store.url, workload)
    )  # asyncio's loop, as the sync client's
    await workload.write(store)
    sync_times = await asyncio.to_thread(_time_sync, store.url, workload)
    name = f"book and finish, {WORKERS} workers, {BLOCKS} blocks"
    results = []
    for q in (0.5, 0.99):
        results += [
            Result(f"{name}, async, p{q * 100:g}", quantile(async_times, q) * 1e3, "ms"),
            Result(f"{name}, sync, p{q * 100:g}", quantile(sync_times, q) * 1e3, "ms"),
        ]
    for count in THREADS:
        await workload.write(store)
        rate = await asyncio.to_thread(_measure_rate, store.url, workload, count)
        results.append(Result(f"sync, {count} {'thread' if count == 1 else 'threads'}", rate, "choices/s"))
    return results


async def _time_async(url: str, workload: RouteWorkload) -> list[float]:
    async with RouterClient.open(url, SETTINGS, wait=False) as router:
        times = []
        for _ in range(WARM_UP + CALLS):
            prompt = workload.hashed_prompt()
            began = perf_counter()
            choice = await router.reserve(prompt)
            await choice.done()
            times.append(perf_counter() - began)
        return sorted(times[WARM_UP:])


def _time_sync(url: str, workload: RouteWorkload) -> list[float]:
    with SyncRouterClient.open(url, SETTINGS, wait=False) as router:
        times = []
        for _ in range(WARM_UP + CALLS):
            prompt = workload.hashed_prompt()
            began = perf_counter()
            choice = router.reserve(prompt)
            choice.done()
            times.append(perf_counter() - began)
        return sorted(times[WARM_UP:])


def _measure_rate(url: str, workload: RouteWorkload, threads: int) -> float:
    """Choices per second, each booked and finished."""
    prompts = [workload.hashed_prompt() for _ in range(threads * CALLS)]
    with SyncRouterClient.open(url, SETTINGS, wait=False) as router, ThreadPoolExecutor(threads) as pool:

        def route(number: int) -> None:
            for prompt in prompts[number * CALLS : (number + 1) * CALLS]:
                with router.route(prompt):
                    pass

        router.reserve(prompts[0], dry_run=True)
        began = perf_counter()
        for _ in pool.map(route, range(threads)):
            pass
        return threads * CALLS / (perf_counter() - began)


async def _main() -> None:
    async with valkey_store() as store:
        results = await measure(store)
    Console(width=130).print(tabulate(results, "the sync client"))


if __name__ == "__main__":
    uvloop.run(_main())
