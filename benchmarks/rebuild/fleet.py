"""The publishers of a whole fleet in one process: `python -m benchmarks.rebuild.fleet NATS_URL WORKERS BLOCKS`.

Fills the ledger of each worker with as many blocks as an engine with a large cache holds, prints `ready` when the stream has
them all, and runs until it is killed.
"""

import asyncio
import random
import sys
from contextlib import AsyncExitStack

import uvloop

from kvatlas.bus.connection import connect_nats
from kvatlas_publishers import Publisher, PublisherSettings

BLOCK_SIZE = 16
PROMPT_BLOCKS = 512


def worker_name(number: int) -> str:
    return f"rebuilt-{number:03}"


async def _main(nats_url: str, workers: int, blocks: int) -> None:
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    async with AsyncExitStack() as stack:
        publishers = []
        for number in range(workers):
            settings = PublisherSettings(worker_id=worker_name(number), model_id="bench", block_size=BLOCK_SIZE)
            publishers.append(await stack.enter_async_context(Publisher(settings, nats=client)))
        rng = random.Random(1)
        for publisher in publishers:
            for first in range(0, blocks, PROMPT_BLOCKS):
                length = min(PROMPT_BLOCKS, blocks - first) * BLOCK_SIZE
                start = rng.randrange(1 << 31)
                await publisher.stored(range(start, start + length), block_size=BLOCK_SIZE)
            await publisher.flush()
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
