"""Memory of the index per block, with one holder and for each additional one; of the process that follows the engines; and of
each idle process."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.pipelines import running_pipeline
from benchmarks.process_usage import usage_of
from kvatlas.store.connection import Store
from kvatlas_cli.memory_release import CHECK_EVERY_S

HOLDERS = 8
HASHES = 64
MESSAGES = 2_048
BLOCKS = HASHES * MESSAGES
ROUNDS = 2
DEADLINE_S = 120
POLL_S = 0.05
RELEASED_S = CHECK_EVERY_S + 1
"""Wait after a burst, for a service to release its memory."""
BLOCK_BYTES = 45
HOLDER_BYTES = 4
LEDGER_BYTES = 150
IDLE_MIB = {"publisher": 45, "indexer": 60}


@dataclass(frozen=True, slots=True)
class _Turn:
    first_bytes: float
    further_bytes: float
    ledger_bytes: float | None
    idle_mib: dict[str, float]
    """Idle memory by part."""


async def measure(_: Store, subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[Comparison]:
    """Each turn has its own store."""
    turns: dict[Subject, list[_Turn]] = defaultdict(list)
    for _round in range(rounds):
        for subject in subjects:
            turns[subject].append(await _measure(subject))
    first = {subject: [turn.first_bytes for turn in taken] for subject, taken in turns.items()}
    further = {subject: [turn.further_bytes for turn in taken] for subject, taken in turns.items()}
    ledger = {
        subject: [turn.ledger_bytes for turn in taken if turn.ledger_bytes is not None]
        for subject, taken in turns.items()
    }
    rows = [
        Comparison("memory of the index a block, one holder", "bytes", first, BLOCK_BYTES),
        Comparison(f"  for each further holder, up to {HOLDERS}", "bytes", further, HOLDER_BYTES),
        Comparison("memory of the publisher a block and engine", "bytes", ledger, LEDGER_BYTES),
    ]
    for part in ("publisher", "NATS", "indexer", "store"):
        idle = {
            subject: [turn.idle_mib[part] for turn in taken if part in turn.idle_mib]
            for subject, taken in turns.items()
        }
        rows.append(Comparison(f"memory of {part}, idle", "MiB", idle, IDLE_MIB.get(part)))
    return rows


async def _measure(subject: Subject) -> _Turn:
    async with running_pipeline(subject, HOLDERS, HASHES) as (engines, pipeline):
        idle_mib = {part: usage_of(pid).rss_bytes / (1 << 20) for part, pid in pipeline.pids.items()}
        publisher = pipeline.pids.get("publisher")
        ledger_before = 0 if publisher is None else usage_of(publisher).rss_bytes
        index = [await pipeline.index_bytes()]
        for first, last in ((0, 1), (1, HOLDERS)):
            await engines.start(f"prepare {MESSAGES} {first} {last} same")
            await engines.results()
            await engines.start("publish 0")
            await engines.results(DEADLINE_S)
            with anyio.fail_after(DEADLINE_S):
                for engine in range(first, last):
                    while await pipeline.depth(engine, last_chain("same", HASHES, MESSAGES)) < CHAIN:
                        await anyio.sleep(POLL_S)
            index.append(await pipeline.index_bytes())
        ledger = None
        if publisher is not None:
            await anyio.sleep(RELEASED_S)
            ledger = (usage_of(publisher).rss_bytes - ledger_before) / BLOCKS / HOLDERS
        return _Turn((index[1] - index[0]) / BLOCKS, (index[2] - index[1]) / BLOCKS / (HOLDERS - 1), ledger, idle_mib)
