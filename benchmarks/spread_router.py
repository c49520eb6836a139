"""One router of the burst, in a process of its own: `python -m benchmarks.spread_router URL ROUTERS NUMBER VARIANT ...`.

Says `ready`, waits for a line, then chooses for its share of the requests, at most 64 at a time; tells one line a choice:
when (ns), request, worker.
"""

import asyncio
import sys
import time

import uvloop

from benchmarks.spread_workload import OUTPUT_TOKENS, SCOPE, Burst, burst
from router_client import BookingSettings, Prompt, RouterClient, RouterSettings

AT_A_TIME = 64

VARIANTS = {
    "all": BookingSettings(),
    "no prefixes in flight": BookingSettings(prefixes_in_flight=False),
    "no reservations": BookingSettings(reservations=False),
}


async def choose(router: RouterClient, asked: Burst, numbers: range) -> list[tuple[int, int, str]]:
    """(when, request, worker) for each of these requests; what is booked stays booked."""
    free = asyncio.Semaphore(AT_A_TIME)
    chosen: list[tuple[int, int, str]] = []

    async def one(number: int) -> None:
        async with free:
            prompt = Prompt.of_tokens(SCOPE, asked.prompt(number), output_tokens=OUTPUT_TOKENS)
            choice = await router.book(prompt)
            chosen.append((time.monotonic_ns(), number, choice.worker_id))

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(one(number))
    return chosen


async def _main(url: str, routers: int, number: int, variant: str, requests: int, workers: int) -> None:
    asked = burst(requests=requests, workers=workers)
    settings = RouterSettings(booking=VARIANTS[variant], deadline_ms=None)
    async with RouterClient.open(url, settings, wait=False) as router:
        await router.pick(Prompt.of_tokens(SCOPE, [1]))
        print("ready", flush=True)
        sys.stdin.readline()
        for when, request, worker_id in await choose(router, asked, range(number, requests, routers)):
            print(when, request, worker_id)
        print("done", flush=True)
        sys.stdin.readline()  # what is booked stays booked until all have chosen


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6])))
