"""The publishers of many workers in one process: `python -m benchmarks.scaling.workers NATS_URL WORKERS BLOCKS`.

Each turn is a line: `events RATE SECONDS` (messages per second of all workers, each of MESSAGE_BLOCKS new blocks), `restart
COUNT` (this many workers end at once, start again with empty caches, and fill them). Heartbeats continue meanwhile.
"""

import asyncio
import random
import sys
from time import perf_counter

import anyio
import uvloop
from nats.aio.client import Client

from benchmarks.child_processes import take_turns
from kvatlas.bus.connection import connect_nats
from kvatlas_publishers import Publisher, PublisherSettings

BLOCK_SIZE = 16
MESSAGE_BLOCKS = 16
PROMPT_BLOCKS = 256


def worker_name(number: int) -> str:
    return f"grown-{number:04}"


class Worker:
    """Runs one worker's publisher in its own task."""

    def __init__(self, client: Client, number: int, blocks: int, rng: random.Random) -> None:
        self._settings = PublisherSettings(worker_id=worker_name(number), model_id="bench", block_size=BLOCK_SIZE)
        self._client = client
        self._blocks = blocks
        self._rng = rng
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._publisher: Publisher | None = None

    async def start(self) -> None:
        """Start the publisher. Returns when it runs and the blocks are on their way."""
        self._ended.clear()
        started = asyncio.Event()
        self._task = asyncio.create_task(self._run(started))
        await started.wait()

    async def stop(self) -> None:
        self._ended.set()
        if self._task is not None:
            await self._task

    async def _run(self, started: asyncio.Event) -> None:
        async with Publisher(self._settings, nats=self._client) as publisher:
            self._publisher = publisher
            for first in range(0, self._blocks, PROMPT_BLOCKS):
                await self.store(min(PROMPT_BLOCKS, self._blocks - first))
            started.set()
            await self._ended.wait()

    async def store(self, blocks: int) -> None:
        """Store the blocks of a new prompt."""
        assert self._publisher is not None
        start = self._rng.randrange(1 << 31)
        await self._publisher.stored(range(start, start + blocks * BLOCK_SIZE), block_size=BLOCK_SIZE)

    async def flush(self) -> None:
        assert self._publisher is not None
        await self._publisher.flush()


async def _main(nats_url: str, count: int, blocks: int) -> None:
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    rng = random.Random(1)
    workers = [Worker(client, number, blocks, rng) for number in range(count)]
    for worker in workers:
        await worker.start()
    for worker in workers:
        await worker.flush()

    async def turn(line: str) -> list[str]:
        what, *numbers = line.split()
        if what == "restart":
            some = rng.sample(workers, int(numbers[0]))
            async with anyio.create_task_group() as group:
                for worker in some:
                    group.start_soon(worker.stop)
            async with anyio.create_task_group() as group:
                for worker in some:
                    group.start_soon(worker.start)
            for worker in some:
                await worker.flush()
            return []
        rate, seconds = map(float, numbers)
        began, sent = perf_counter(), 0
        while (elapsed := perf_counter() - began) < seconds:
            while sent < elapsed * rate:
                await rng.choice(workers).store(MESSAGE_BLOCKS)
                sent += 1
            await asyncio.sleep(0.005)
        return [str(sent)]

    await take_turns(turn)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
