"""From published to visible: an engine publishes one new block, and a router asks until it finds it.

Quiet: nothing else happens. Busy: 64 other engines, followed by the same process, publish 2,000 messages a second.
"""

import asyncio
import random
from collections import defaultdict
from itertools import count
from time import perf_counter

from benchmarks.child_processes import child_process
from benchmarks.peer.comparison import Comparison
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.pipelines import PIPELINES, Pipeline, free_ports
from benchmarks.peer.prompts import BLOCK_SIZE, VOCABULARY
from benchmarks.timing import quantile
from kvatlas.store.connection import Store

ENGINES = 64
HASHES = 4
RATE = 2_000
SECONDS = 8
SETTLED_S = 1.0
QUIET_PROBES = 100
PAUSE_S = 0.05
ROUNDS = 2
LOST_S = 20


async def measure(_: Store, rounds: int = ROUNDS) -> list[Comparison]:
    """Every turn has a store of its own."""
    quiet: dict[str, list[list[float]]] = defaultdict(list)
    busy: dict[str, list[list[float]]] = defaultdict(list)
    for _round in range(rounds):
        for who in PIPELINES:
            first, second = await _probe(who)
            quiet[who].append(first)
            busy[who].append(second)
    return [
        Comparison(f"published to visible, {name}, p{q * 100:g}", "ms", *_quantiles(q, times))
        for name, times in (("quiet", quiet), (f"{RATE:,} messages/s of {ENGINES} engines", busy))
        for q in (0.5, 0.99)
    ]


def _quantiles(q: float, times: dict[str, list[list[float]]]) -> tuple[list[float], list[float]]:
    ours, theirs = ([quantile(turn, q) * 1e3 for turn in times[who]] for who in PIPELINES)
    return ours, theirs


async def _probe(who: str) -> tuple[list[float], list[float]]:
    """Sorted seconds: of the quiet probes, of the busy ones."""
    first_port = free_ports(ENGINES + 1)
    args = [str(first_port), str(ENGINES), str(HASHES)]
    with Engines(1, first_port + ENGINES) as probe:
        async with (
            child_process("benchmarks.peer.engine_process", args) as engines,
            PIPELINES[who](first_port, ENGINES + 1) as pipeline,
        ):
            await asyncio.to_thread(probe.wait_for_subscribers)
            blocks = count()
            quiet = [await _see_one(probe, pipeline, next(blocks)) for _ in range(QUIET_PROBES)]
            await engines.start(f"prepare {RATE * SECONDS // ENGINES // 16 * 16} 0 {ENGINES} own")
            await engines.results()
            await engines.start(f"publish {RATE}")
            await asyncio.sleep(SETTLED_S)
            published = asyncio.create_task(engines.results())
            busy = []
            while not published.done():
                busy.append(await _see_one(probe, pipeline, next(blocks)))
            await published
    return sorted(quiet), sorted(busy)


async def _see_one(probe: Engines, pipeline: Pipeline, number: int) -> float:
    """Seconds until the block that is published now is found."""
    tokens = random.Random(f"probe/{number}").choices(range(VOCABULARY), k=BLOCK_SIZE)
    payload, _ = encode_stored(tokens, BLOCK_SIZE)
    began = perf_counter()
    probe.publish(0, payload)
    async with asyncio.timeout(LOST_S):
        while not await pipeline.depth(ENGINES, tokens):
            await asyncio.sleep(0)
    seconds = perf_counter() - began
    await asyncio.sleep(PAUSE_S)
    return seconds
