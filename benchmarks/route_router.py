"""A router process that chooses as fast as it can: `python -m benchmarks.route_router REDIS_URL WORKERS BLOCKS SECONDS`.

Says `ready`, waits for a line on stdin, routes AT_A_TIME prompts at a time, and prints how many it ended, in how many seconds,
with how many seconds of processor time.
"""

import asyncio
import sys
from time import perf_counter, process_time

import uvloop

from benchmarks.route_workload import RouteWorkload
from router_client import RouterClient, RouterSettings

AT_A_TIME = 16


async def _main(url: str, workers: int, blocks: int, seconds: float) -> None:
    workload = RouteWorkload(workers, blocks)
    async with RouterClient.open(url, RouterSettings(deadline_ms=None), wait=False) as router:
        await (await router.book(workload.hashed_prompt())).finish()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        ended, began, worked = 0, perf_counter(), process_time()

        async def route() -> None:
            nonlocal ended
            while perf_counter() - began < seconds:
                async with router.route(workload.hashed_prompt()) as choice:
                    await choice.first_token()
                ended += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(route())
        print(ended, perf_counter() - began, process_time() - worked, flush=True)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
