"""Choices per second of one and of four router processes, and their CPU time."""

import asyncio
from contextlib import AsyncExitStack

from benchmarks.child_processes import child_process
from benchmarks.result import Result
from benchmarks.route.workload import BLOCKS, WORKERS, RouteWorkload
from benchmarks.stores import store_cpu_s
from kvatlas.store.connection import Store

PROCESSES = (1, 4)
SECONDS = 2.0


async def measure(store: Store) -> list[Result]:
    """Measure choices that are booked, whose first token is reported, and that are finished."""
    results = []
    for processes in PROCESSES:
        results += await _measure_processes(store, processes)
    return results


async def _measure_processes(store: Store, processes: int) -> list[Result]:
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.write(store)
    async with AsyncExitStack() as stack:
        args = [store.url, str(WORKERS), str(BLOCKS), str(SECONDS)]
        routers = [
            await stack.enter_async_context(child_process("benchmarks.route.router_process", args))
            for _ in range(processes)
        ]
        await workload.write_load(store)
        before_s = await store_cpu_s(store)
        for router in routers:
            await router.start()
        printed = await asyncio.gather(*(router.results() for router in routers))
        store_s = await store_cpu_s(store) - before_s
    rows = [tuple(map(float, line.split())) for (line,) in printed]
    finished = sum(choices for choices, _, _ in rows)
    rate = sum(choices / seconds for choices, seconds, _ in rows)
    router_s = sum(cpu_s for _, _, cpu_s in rows)
    return [
        Result(
            f"route, booked and ended, {processes} {'process' if processes == 1 else 'processes'}", rate, "choices/s"
        ),
        Result("  CPU time of the router for each", router_s * 1e3 / finished, "ms"),
        Result("  CPU time of the store for each", store_s * 1e3 / finished, "ms"),
    ]
