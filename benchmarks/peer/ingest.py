"""From the engines' sockets into the index, as fast as it goes: blocks a second, and processor time a block by process.

16 engines; everything shares this machine's cores, the engines too (their time is not counted).
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import anyio

from benchmarks.peer.comparison import Comparison
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.pipelines import PIPELINES, OurPipeline, Pipeline, running_pipeline
from benchmarks.process_usage import usage_of
from benchmarks.store_calls import StoreCall, store_calls
from kvatlas.store.connection import Store

ENGINES = 16
MESSAGES = {1: 2_048, 16: 1_024, 64: 512}
"""Hashes a message to messages of each engine."""
ROUNDS = 2
DEADLINE_S = 120
POLL_S = 0.01
PARTS = ("publisher", "NATS", "indexer", "store")


@dataclass(frozen=True, slots=True)
class _Turn:
    rate: float
    cpu_us: dict[str, float]
    """A block, by part."""
    longest: StoreCall | None


async def measure(_: Store, rounds: int = ROUNDS) -> list[Comparison]:
    """Every turn has a store of its own."""
    turns: dict[tuple[str, int], list[_Turn]] = defaultdict(list)
    for _round in range(rounds):
        for hashes in MESSAGES:
            for who in PIPELINES:
                turns[who, hashes].append(await _ingest(who, hashes, MESSAGES[hashes]))
    rows = []
    for hashes in MESSAGES:
        ours, theirs = turns["ours", hashes], turns["theirs", hashes]
        name = f"engine sockets to index, {hashes} {'hash' if hashes == 1 else 'hashes'} a message"
        rows += [
            Comparison(name, "blocks/s", [turn.rate for turn in ours], [turn.rate for turn in theirs]),
            Comparison(
                "  processor time a block, all processes",
                "us",
                [sum(turn.cpu_us.values()) for turn in ours],
                [sum(turn.cpu_us.values()) for turn in theirs],
            ),
            *(Comparison(f"    {part}", "us", [turn.cpu_us[part] for turn in ours], []) for part in PARTS),
        ]
    calls = [turn.longest for turns_of in turns.values() for turn in turns_of if turn.longest is not None]
    if calls:
        longest = max(calls, key=lambda call: call.ms)
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", [longest.ms], []))
    return rows


async def _ingest(who: str, hashes: int, messages: int) -> _Turn:
    async with running_pipeline(who, ENGINES, hashes) as (engines, pipeline):
        await engines.start(f"prepare {messages} 0 {ENGINES} own")
        await engines.results()
        async with _calls(pipeline) as longest:
            before = {part: usage_of(pid).cpu_s for part, pid in pipeline.pids.items()}
            began = perf_counter()
            await engines.start("publish 0")
            with anyio.fail_after(DEADLINE_S):
                for engine in range(ENGINES):
                    tokens = last_chain(engine, hashes, messages)
                    while await pipeline.depth(engine, tokens) < CHAIN:
                        await anyio.sleep(POLL_S)
            seconds = perf_counter() - began
            await engines.results()
            blocks = ENGINES * messages * hashes
            cpu_us = {part: (usage_of(pid).cpu_s - before[part]) * 1e6 / blocks for part, pid in pipeline.pids.items()}
            return _Turn(blocks / seconds, cpu_us, await longest())


@asynccontextmanager
async def _calls(pipeline: Pipeline) -> AsyncIterator[Callable[[], Awaitable[StoreCall | None]]]:
    """The longest store call from now on; the peer has no store."""
    if isinstance(pipeline, OurPipeline):
        async with store_calls(pipeline.store) as calls:
            yield calls.longest
    else:

        async def none() -> None:
            return None

        yield none
