"""A child process that routes as fast as it can: `python -m benchmarks.route.router_process REDIS_URL WORKERS BLOCKS SECONDS`.

Routes CONCURRENCY prompts at a time. Its result is the number of finished choices, the seconds that they took, and the seconds
of CPU time.
"""

import asyncio
import sys
from time import perf_counter, process_time

import uvloop

from benchmarks.route.workload import RouteWorkload
from router_client import RouterClient, RouterSettings

CONCURRENCY = 16


async def _main(url: str, workers: int, blocks: int, seconds: float) -> None:
    workload = RouteWorkload(workers, blocks)
    async with RouterClient.open(url, RouterSettings(deadline_ms=None), wait=False) as router:
        await (await router.reserve(workload.hashed_prompt())).done()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        finished, began, cpu_began = 0, perf_counter(), process_time()

        async def route() -> None:
            nonlocal finished
            while perf_counter() - began < seconds:
                async with router.route(workload.hashed_prompt()) as choice:
                    await choice.first_token()
                finished += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(route())
        print(finished, perf_counter() - began, process_time() - cpu_began)
        print("done", flush=True)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
