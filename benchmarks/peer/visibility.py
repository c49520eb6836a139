"""Time from publication to visibility: an engine publishes one new block, and a router polls until it finds the block.

Quiet: nothing else happens. Busy: 64 other engines, followed by the same process, publish 2,000 messages per second.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from benchmarks.child_processes import child_process
from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.pipelines import PIPELINES, Pipeline, free_ports
from benchmarks.peer.prompts import BLOCK_SIZE, VOCABULARY
from benchmarks.timing import quantile
from kvatlas.store.connection import Store

ENGINES = 64
HASHES = 4
RATE = 2_000
MESSAGES = 256
"""Messages per engine."""
SETTLED_S = 1.0
QUIET_PROBES = 100
PAUSE_S = 0.05
ROUNDS = 2
LOST_S = 20
QUIET_P50_MS = 1.0
BUSY_P99_MS = 10.0


@dataclass(frozen=True, slots=True)
class _Turn:
    """Sorted seconds."""

    quiet: list[float]
    busy: list[float]


async def measure(_: Store, subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[Comparison]:
    """Each turn has its own store."""
    turns: dict[Subject, list[_Turn]] = defaultdict(list)
    for _round in range(rounds):
        for subject in subjects:
            turns[subject].append(await _probe(subject))
    rows = []
    for q, budget in ((0.5, QUIET_P50_MS), (0.99, None)):
        figures = {subject: [quantile(turn.quiet, q) * 1e3 for turn in taken] for subject, taken in turns.items()}
        rows.append(Comparison(f"published to visible, quiet, p{q * 100:g}", "ms", figures, budget))
    for q, budget in ((0.5, None), (0.99, BUSY_P99_MS)):
        figures = {subject: [quantile(turn.busy, q) * 1e3 for turn in taken] for subject, taken in turns.items()}
        name = f"published to visible, {RATE:,} messages/s of {ENGINES} engines, p{q * 100:g}"
        rows.append(Comparison(name, "ms", figures, budget))
    return rows


async def _probe(subject: Subject) -> _Turn:
    first_port = free_ports(ENGINES + 1)
    args = [str(first_port), str(ENGINES), str(HASHES)]
    with Engines(1, first_port + ENGINES) as probe:
        async with (
            child_process("benchmarks.peer.engine_process", args) as engines,
            PIPELINES[subject](first_port, ENGINES + 1) as pipeline,
        ):
            await asyncio.to_thread(probe.wait_for_subscribers)
            blocks = count()
            quiet = [await see_one(probe, pipeline, ENGINES, next(blocks)) for _ in range(QUIET_PROBES)]
            await engines.start(f"prepare {MESSAGES} 0 {ENGINES} own")
            await engines.results()
            await engines.start(f"publish {RATE}")
            await asyncio.sleep(SETTLED_S)
            published = asyncio.create_task(engines.results())
            busy = []
            while not published.done():
                busy.append(await see_one(probe, pipeline, ENGINES, next(blocks)))
            await published
    return _Turn(sorted(quiet), sorted(busy))


async def see_one(probe: Engines, pipeline: Pipeline, engine: int, number: int) -> float:
    """Seconds until the pipeline finds a block, which `probe` publishes now, at this engine."""
    tokens = random.Random(f"probe/{number}").choices(range(VOCABULARY), k=BLOCK_SIZE)
    payload, _ = encode_stored(tokens, BLOCK_SIZE)
    began = perf_counter()
    probe.publish(0, payload)
    async with asyncio.timeout(LOST_S):
        while not await pipeline.depth(engine, tokens):
            await asyncio.sleep(0)
    seconds = perf_counter() - began
    await asyncio.sleep(PAUSE_S)
    return seconds
