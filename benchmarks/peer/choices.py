"""Choose and reserve, by number of workers: how long one choice takes, how many a second, and their processor time."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.child_processes import Child, child_process
from benchmarks.peer.comparison import Comparison
from benchmarks.peer.dynamo_process import dynamo_child
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.pool import held_prefixes, write_loads, write_pool
from benchmarks.peer.prompts import BLOCK_SIZE, BLOCKS, PromptSource
from benchmarks.peer.turns import CONCURRENCY
from benchmarks.store_calls import store_calls
from benchmarks.stores import store_cpu_s
from kvatlas.store.connection import Store

POOLS = ((8, 8), (64, 8), (64, 64), (256, 8), (1_000, 8))
"""(workers, how many of them hold each prefix, all to different depths)."""
ROUNDS = 3
CHILD_READY_S = 60


@dataclass(frozen=True, slots=True)
class _Turn:
    p50_ms: float
    p99_ms: float
    rate: float
    router_ms: float
    store_ms: float


async def measure(store: Store, rounds: int = ROUNDS) -> list[Comparison]:
    comparisons = []
    for workers, holders in POOLS:
        comparisons += await _measure_pool(store, workers, holders, rounds)
    return comparisons


async def _measure_pool(store: Store, workers: int, holders: int, rounds: int) -> list[Comparison]:
    source = PromptSource(workers, holders)
    await write_pool(store, workers, held_prefixes(source))
    args = [store.url, str(workers), str(holders)]
    turns: dict[tuple[str, str], list[_Turn]] = defaultdict(list)
    async with (
        child_process("benchmarks.peer.our_choices", args) as ours,
        _dynamo_router(source, workers, holders) as theirs,
        store_calls(store) as calls,
    ):
        for _ in range(rounds):
            for given in ("tokens", "hashes"):
                await write_loads(store, workers)
                turns["ours", given].append(await _take(ours, given, store))
                turns["theirs", given].append(await _take(theirs, given, None))
        longest = await calls.longest()
    name = f"{workers:,} workers, {holders} holders, {BLOCKS} blocks"
    rows = []
    for given in ("tokens", "hashes"):
        mine, other = turns["ours", given], turns["theirs", given]
        rows += [
            Comparison(f"choose and reserve from {given}, {name}, p50", "ms", *_pick("p50_ms", mine, other)),
            Comparison(f"choose and reserve from {given}, {name}, p99", "ms", *_pick("p99_ms", mine, other)),
        ]
        if given == "tokens":
            rows += [
                Comparison(
                    f"choices, {CONCURRENCY} at a time from {given}, {name}", "1/s", *_pick("rate", mine, other)
                ),
                Comparison("  processor time of the router for each", "ms", *_pick("router_ms", mine, other)),
                Comparison("  processor time of the store for each", "ms", [turn.store_ms for turn in mine], []),
            ]
    if longest is not None:
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", [longest.ms], []))
    return rows


def _pick(field: str, ours: list[_Turn], theirs: list[_Turn]) -> tuple[list[float], list[float]]:
    return [getattr(turn, field) for turn in ours], [getattr(turn, field) for turn in theirs]


async def _take(child: Child, given: str, store: Store | None) -> _Turn:
    """Latency, then rate. `store`: whose processor time is counted to the choices."""
    await child.start(f"latency {given}")
    (line,) = await child.results()
    latency = json.loads(line)
    before_s = 0.0 if store is None else await store_cpu_s(store)
    await child.start(f"rate {given}")
    (line,) = await child.results()
    store_s = 0.0 if store is None else await store_cpu_s(store) - before_s
    rate = json.loads(line)
    choices = rate["choices"]
    return _Turn(
        latency["p50_ms"],
        latency["p99_ms"],
        choices / rate["seconds"],
        rate["cpu_s"] * 1e3 / choices,
        store_s * 1e3 / choices,
    )


@asynccontextmanager
async def _dynamo_router(source: PromptSource, workers: int, holders: int) -> AsyncIterator[Child]:
    """Their router, with an engine for each worker that holds something and one silent engine for all others."""
    holding = sorted({worker for depths in source.depths for worker in depths})
    with Engines(len(holding) + 1) as engines:
        sockets = {str(worker): engines.endpoints[i] for i, worker in enumerate(holding)}
        args = [str(workers), str(holders), engines.endpoints[-1], json.dumps(sockets)]

        def publish() -> None:
            engines.wait_for_subscribers(len(holding))
            for tokens, depths in held_prefixes(source):
                for worker, depth in depths.items():
                    payload, _ = encode_stored(tokens[: depth * BLOCK_SIZE], BLOCK_SIZE)
                    engines.publish(holding.index(worker), payload)

        published = asyncio.create_task(asyncio.to_thread(publish))
        async with dynamo_child("benchmarks.peer.their_choices", args, ready_s=CHILD_READY_S) as child:
            await published
            yield child
