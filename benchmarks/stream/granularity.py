"""What `--granularity` saves on the way from the engines to the index, and what overlaps lose:
`python -m benchmarks.stream.granularity`.

Each granularity has its own processes, in alternating turns. CPU times and bytes are per engine block, published or not.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import mean, median

import anyio
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.child_processes import child_process
from benchmarks.peer.engine_process import CHAIN, chain_tokens
from benchmarks.peer.ours.pool import SCOPE
from benchmarks.peer.pipelines import WORKER, OurPipeline, free_ports, our_pipeline
from benchmarks.peer.prompts import BLOCK_SIZE, VOCABULARY
from benchmarks.process_usage import usage_of
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import stream_info
from router_client import Prompt, RouterClient, RouterSettings

GRANULARITIES = (1, 4, 16)
ENGINES = 16
HASHES = 16
"""Blocks per message."""
MESSAGES = 1_024
"""Messages per engine."""
ROUNDS = 2
PROMPTS = 200
DEADLINE_S = 120
POLL_S = 0.02
BLOCKS = ENGINES * MESSAGES * HASHES
PARTS = ("publisher", "NATS", "indexer", "store")


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures per block, except `messages` in the stream, and `missed`: the blocks by which an overlap falls short of what the
    engine holds."""

    cpu_us: dict[str, float]
    store_bytes: float
    messages: int
    missed: list[int]


async def measure(rounds: int = ROUNDS) -> dict[int, list[Turn]]:
    """Turns by granularity."""
    turns: dict[int, list[Turn]] = defaultdict(list)
    for _ in range(rounds):
        for granularity in GRANULARITIES:
            turns[granularity].append(await _measure(granularity))
    return turns


async def _measure(granularity: int) -> Turn:
    first_port = free_ports(ENGINES)
    args = [str(first_port), str(ENGINES), str(HASHES)]
    async with (
        child_process("benchmarks.peer.engine_process", args) as engines,
        our_pipeline(first_port, ENGINES, granularity) as pipeline,
    ):
        await engines.start(f"prepare {MESSAGES} 0 {ENGINES} own")
        await engines.results()
        before = {part: usage_of(pipeline.pids[part]).cpu_s for part in PARTS}
        bytes_before = await pipeline.index_bytes()
        await engines.start("publish 0")
        await engines.results()
        async with AsyncExitStack() as stack:
            settings = RouterSettings(deadline_ms=None)
            router = await stack.enter_async_context(RouterClient.open(pipeline.store.url, settings, wait=False))
            with anyio.fail_after(DEADLINE_S):
                for engine in range(ENGINES):
                    last = chain_tokens(engine, MESSAGES * HASHES // CHAIN - 1)
                    while await _overlap(router, engine, last) < CHAIN:
                        await anyio.sleep(POLL_S)
            cpu_us = {part: (usage_of(pipeline.pids[part]).cpu_s - before[part]) * 1e6 / BLOCKS for part in PARTS}
            store_bytes = (await pipeline.index_bytes() - bytes_before) / BLOCKS
            missed = [await _missed(router, random.Random(number)) for number in range(PROMPTS)]
        return Turn(cpu_us, store_bytes, await _messages(pipeline), missed)


async def _overlap(router: RouterClient, engine: int, tokens: Sequence[int]) -> int:
    """Number of blocks that a router finds at an engine; 0 also while the engine is unknown."""
    found = {one.worker_id: one.resident_blocks for one in await router.overlap(Prompt.of_tokens(SCOPE, [*tokens, 0]))}
    return found.get(f"{WORKER}-dp{engine}", 0)


async def _missed(router: RouterClient, rng: random.Random) -> int:
    """Number of blocks missed for a prompt of which an engine holds a part."""
    engine, held = rng.randrange(ENGINES), rng.randint(1, CHAIN)
    chain = chain_tokens(engine, rng.randrange(MESSAGES * HASHES // CHAIN))
    new = rng.choices(range(VOCABULARY), k=(CHAIN - held) * BLOCK_SIZE)
    return held - await _overlap(router, engine, [*chain[: held * BLOCK_SIZE], *new])


async def _messages(pipeline: OurPipeline) -> int:
    client = await connect_nats(pipeline.nats_url, name="kvatlas-benchmark", wait=False)
    try:
        return (await stream_info(client)).last_seq
    finally:
        await client.close()


def tabulate(turns: dict[int, list[Turn]]) -> Table:
    """One row per granularity: medians over the turns."""
    title = f"granularity; {ENGINES} engines, {HASHES} blocks a message, {BLOCKS:,} blocks of {BLOCK_SIZE} tokens"
    table = Table("granularity", *(f"{part}, us a block" for part in PARTS), title=title)
    for column in ("store, bytes a block", "messages of the stream", "blocks missed, mean", "most"):
        table.add_column(column)
    for granularity, taken in turns.items():
        missed = [blocks for turn in taken for blocks in turn.missed]
        table.add_row(
            str(granularity),
            *(f"{median(turn.cpu_us[part] for turn in taken):.2f}" for part in PARTS),
            f"{median(turn.store_bytes for turn in taken):.1f}",
            f"{median(turn.messages for turn in taken):,.0f}",
            f"{mean(missed):.2f}",
            str(max(missed)),
        )
    return table


if __name__ == "__main__":
    Console(width=150).print(tabulate(uvloop.run(measure())))
