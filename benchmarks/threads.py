"""The sync client beside the async one: what a booked and ended choice takes through its thread, and choices a second of
several threads: `python -m benchmarks.threads`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks.result import Result, quantile, show
from benchmarks.route_workload import RouteWorkload
from kvatlas.embedded import valkey_server
from kvatlas.store.connection import Store, open_store
from router_client import RouterClient, RouterSettings, SyncRouterClient

WORKERS, BLOCKS = 64, 512
CALLS = 500
WARM_UP = 50
THREADS = (1, 8)
SETTINGS = RouterSettings(deadline_ms=None)


async def measure(store: Store, url: str) -> list[Result]:
    """Both over the same store, one call at a time; then threads at once."""
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.tell(store)
    tasks = await asyncio.to_thread(asyncio.run, _tasks(url, workload))  # in the loop that the sync client has
    await workload.tell(store)
    threads = await asyncio.to_thread(_threads, url, workload)
    name = f"book and finish, {WORKERS} workers, {BLOCKS} blocks"
    results = []
    for q in (0.5, 0.99):
        results += [
            Result(f"{name}, async, p{q * 100:g}", quantile(tasks, q) * 1e3, "ms"),
            Result(f"{name}, sync, p{q * 100:g}", quantile(threads, q) * 1e3, "ms"),
        ]
    for count in THREADS:
        await workload.tell(store)
        rate = await asyncio.to_thread(_rate, url, workload, count)
        results.append(Result(f"sync, {count} {'thread' if count == 1 else 'threads'}", rate, "choices/s"))
    return results


async def _tasks(url: str, workload: RouteWorkload) -> list[float]:
    async with RouterClient.open(url, SETTINGS, wait=False) as router:
        took = []
        for _ in range(WARM_UP + CALLS):
            prompt = workload.hashed_prompt()
            began = perf_counter()
            choice = await router.book(prompt)
            await choice.finish()
            took.append(perf_counter() - began)
        return sorted(took[WARM_UP:])


def _threads(url: str, workload: RouteWorkload) -> list[float]:
    with SyncRouterClient.open(url, SETTINGS, wait=False) as router:
        took = []
        for _ in range(WARM_UP + CALLS):
            prompt = workload.hashed_prompt()
            began = perf_counter()
            choice = router.book(prompt)
            choice.finish()
            took.append(perf_counter() - began)
        return sorted(took[WARM_UP:])


def _rate(url: str, workload: RouteWorkload, threads: int) -> float:
    """Choices a second, each booked and ended."""
    prompts = [workload.hashed_prompt() for _ in range(threads * CALLS)]
    with SyncRouterClient.open(url, SETTINGS, wait=False) as router, ThreadPoolExecutor(threads) as pool:

        def serve(number: int) -> None:
            for prompt in prompts[number * CALLS : (number + 1) * CALLS]:
                with router.route(prompt):
                    pass

        router.pick(prompts[0])
        began = perf_counter()
        for _ in pool.map(serve, range(threads)):
            pass
        return threads * CALLS / (perf_counter() - began)


async def _main() -> None:
    async with valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            results = await measure(store, valkey.url)
        finally:
            await store.close()
    Console(width=130).print(show(results, "the sync client"))


if __name__ == "__main__":
    uvloop.run(_main())
