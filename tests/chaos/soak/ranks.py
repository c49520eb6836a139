"""Simulated engine ranks with caches of a fixed size.

    python -m tests.chaos.soak.ranks FIRST_PORT RANKS BLOCKS STEPS_A_SECOND LIFE_S

Rank r publishes on port FIRST_PORT + r and replays on FIRST_PORT + RANKS + r. Prompts begin with one of a few heads and evict
the oldest. Now and then a rank ends and a new life of it begins, with an empty cache; a life lasts LIFE_S on average.
"""

import asyncio
import random
import sys
from contextlib import AsyncExitStack

from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.zmq_events import EventEncoding, FeedSettings, ZmqEventFeed, open_feed

BLOCK = 16
HEADS, HEAD_BLOCKS, TAIL_BLOCKS = 8, 24, 8
BUFFER_STEPS = 1_000


class Rank:
    """One rank's current life."""

    def __init__(self, number: int, first_port: int, ranks: int, blocks: int, rng: random.Random) -> None:
        self._settings = FeedSettings(
            f"tcp://127.0.0.1:{first_port + number}",
            f"tcp://127.0.0.1:{first_port + ranks + number}",
            buffer_steps=BUFFER_STEPS,
        )
        self._encoding = EventEncoding(BLOCK, rank=number)
        self._blocks = blocks
        self._rng = rng
        self._sequences = 0
        self._life = AsyncExitStack()
        self._replay: asyncio.Task[None] | None = None
        self._feed: ZmqEventFeed | None = None
        self._cache: KVCache | None = None

    async def begin(self) -> None:
        """Begin a new life: an empty cache, other hashes, numbers from 0."""
        hasher = SeededBlockHasher(self._rng.randrange(1 << 31))
        self._cache = KVCache(num_blocks=self._blocks, block_size=BLOCK, hasher=hasher)
        self._feed = await self._life.enter_async_context(open_feed(self._encoding, self._settings))
        self._replay = asyncio.create_task(self._feed.serve_replay())

    async def end(self) -> None:
        if self._replay is not None:
            self._replay.cancel()
            await asyncio.gather(self._replay, return_exceptions=True)
        await self._life.aclose()
        self._life = AsyncExitStack()

    async def step(self, heads: list[list[int]]) -> None:
        """Serve one request at once."""
        assert self._cache is not None and self._feed is not None
        head = self._rng.choice(heads)[: BLOCK * self._rng.randint(1, HEAD_BLOCKS)]
        tail = [self._rng.randrange(50_000) for _ in range(BLOCK * self._rng.randint(1, TAIL_BLOCKS))]
        self._sequences += 1
        self._cache.allocate(AllocationRequest(str(self._sequences), head + tail))
        self._cache.free(str(self._sequences))
        if events := self._cache.take_events():
            await self._feed.publish(events)


async def _main(first_port: int, ranks: int, blocks: int, steps_a_second: float, life_s: float) -> None:
    rng = random.Random(1)
    heads = [[rng.randrange(50_000) for _ in range(BLOCK * HEAD_BLOCKS)] for _ in range(HEADS)]
    all_ranks = [Rank(number, first_port, ranks, blocks, rng) for number in range(ranks)]
    for rank in all_ranks:
        await rank.begin()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    stopped = loop.run_in_executor(None, sys.stdin.readline)
    next_end_s = loop.time() + rng.expovariate(ranks / life_s)
    while not stopped.done():
        if loop.time() > next_end_s:
            next_end_s = loop.time() + rng.expovariate(ranks / life_s)
            one = rng.choice(all_ranks)
            await one.end()
            await one.begin()
        await rng.choice(all_ranks).step(heads)
        await asyncio.sleep(1 / steps_a_second)
    print("done", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
