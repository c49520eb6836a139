"""From the engines' sockets into the index, as fast as possible: blocks per second, and CPU time per block by process.

16 engines; everything shares this machine's cores, including the engines (their time is not counted).
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import anyio

from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.pipelines import OurPipeline, Pipeline, running_pipeline
from benchmarks.process_usage import usage_of
from benchmarks.store_calls import StoreCall, store_calls
from kvatlas.store.connection import Store

ENGINES = 16
MESSAGES = {1: 2_048, 16: 1_024, 64: 512}
"""Messages of each engine, by hashes per message."""
ROUNDS = 2
DEADLINE_S = 120
POLL_S = 0.01
PARTS = ("publisher", "NATS", "indexer", "store")
BUDGETS_US = {"publisher": 2.0, "store": 1.5}
"""Per block, at 16 blocks per message."""
BUDGET_US = 4.0
CALL_MS = 5.0


@dataclass(frozen=True, slots=True)
class _Turn:
    rate: float
    cpu_us: dict[str, float]
    """Per block, by part."""
    longest: StoreCall | None


async def measure(_: Store, subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[Comparison]:
    """Each turn has its own store."""
    turns: dict[int, dict[Subject, list[_Turn]]] = defaultdict(lambda: defaultdict(list))
    for _round in range(rounds):
        for hashes in MESSAGES:
            for subject in subjects:
                turns[hashes][subject].append(await _ingest(subject, hashes, MESSAGES[hashes]))
    rows = []
    for hashes, taken in turns.items():
        name = f"engine sockets to index, {hashes} {'hash' if hashes == 1 else 'hashes'} a message"
        whole = {subject: [sum(turn.cpu_us.values()) for turn in of] for subject, of in taken.items()}
        rows += [
            Comparison(name, "blocks/s", {subject: [turn.rate for turn in of] for subject, of in taken.items()}),
            Comparison("  CPU time a block", "us", whole, BUDGET_US if hashes == 16 else None),
        ]
        for part in PARTS if Subject.OURS in taken else ():
            figures = {Subject.OURS: [turn.cpu_us[part] for turn in taken[Subject.OURS]]}
            rows.append(Comparison(f"    {part}", "us", figures, BUDGETS_US.get(part) if hashes == 16 else None))
    calls = [turn.longest for taken in turns.values() for turn in taken[Subject.OURS] if turn.longest is not None]
    if calls:
        longest = max(calls, key=lambda call: call.ms)
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", {Subject.OURS: [longest.ms]}, CALL_MS))
    return rows


async def _ingest(subject: Subject, hashes: int, messages: int) -> _Turn:
    async with running_pipeline(subject, ENGINES, hashes) as (engines, pipeline):
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
    """Record the longest store call in the block; the peer has no store."""
    if isinstance(pipeline, OurPipeline):
        async with store_calls(pipeline.store) as calls:
            yield calls.longest
    else:

        async def none() -> None:
            return None

        yield none
