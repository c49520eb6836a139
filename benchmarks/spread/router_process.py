"""One router of several as a child process: `python -m benchmarks.spread.router_process URL ROUTERS NUMBER VARIANT REQUESTS
WORKERS`.

It chooses for its share of the requests, up to CONCURRENCY at a time. Its results are the choices: when (ns), request, worker.
"""

import asyncio
import sys
import time

import uvloop

from benchmarks.spread.burst import OUTPUT_TOKENS, SCOPE, Burst, make_burst
from router_client import BookingSettings, Prompt, RouterClient, RouterSettings

CONCURRENCY = 64

VARIANTS = {
    "all": BookingSettings(),
    "no prefixes in flight": BookingSettings(prefixes_in_flight=False),
    "no reservations": BookingSettings(reservations=False),
}


async def choose(router: RouterClient, burst: Burst, numbers: range) -> list[tuple[int, int, str]]:
    """(when, request, worker) for each of these requests; their bookings are not released."""
    slots = asyncio.Semaphore(CONCURRENCY)
    choices: list[tuple[int, int, str]] = []

    async def choose_one(number: int) -> None:
        async with slots:
            prompt = Prompt.of_tokens(SCOPE, burst.prompt(number), output_tokens=OUTPUT_TOKENS)
            choice = await router.reserve(prompt)
            choices.append((time.monotonic_ns(), number, choice.worker_id))

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(choose_one(number))
    return choices


async def _main(url: str, routers: int, number: int, variant: str, requests: int, workers: int) -> None:
    burst = make_burst(requests=requests, workers=workers)
    settings = RouterSettings(booking=VARIANTS[variant], deadline_ms=None)
    async with RouterClient.open(url, settings, wait=False) as router:
        await router.reserve(Prompt.of_tokens(SCOPE, [1]), dry_run=True)
        print("ready", flush=True)
        sys.stdin.readline()
        for when, request, worker_id in await choose(router, burst, range(number, requests, routers)):
            print(when, request, worker_id)
        print("done", flush=True)
        sys.stdin.readline()  # keeps the bookings until all routers have chosen


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6])))
