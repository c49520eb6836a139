"""Choosing and reserving, by number of workers: latency, choices per second, and CPU time."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.child_processes import Child, child_process
from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.dynamo.processes import dynamo_child
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.ours.pool import held_prefixes, write_loads, write_pool
from benchmarks.peer.prompts import BLOCK_SIZE, BLOCKS, PromptSource
from benchmarks.peer.turns import CONCURRENCY
from benchmarks.store_calls import store_calls
from benchmarks.stores import store_cpu_s
from kvatlas.store.connection import Store

POOLS = ((8, 8), (64, 8), (64, 64), (256, 8), (1_000, 8))
"""(workers, how many of them hold each prefix, each to a different depth)."""
ROUNDS = 3
CHILD_READY_S = 60
ROUTER_MS = 0.5
STORE_MS = 0.2
CALL_MS = 5.0


@dataclass(frozen=True, slots=True)
class _Turn:
    p50_ms: float
    p99_ms: float
    rate: float
    router_ms: float
    store_ms: float


async def measure(store: Store, subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[Comparison]:
    comparisons = []
    for workers, holders in POOLS:
        comparisons += await _measure_pool(store, subjects, workers, holders, rounds)
    return comparisons


async def _measure_pool(
    store: Store, subjects: Sequence[Subject], workers: int, holders: int, rounds: int
) -> list[Comparison]:
    source = PromptSource(workers, holders)
    await write_pool(store, workers, held_prefixes(source))
    routers = {Subject.OURS: _our_router(store, source), Subject.THEIRS: _their_router(source)}
    turns: dict[str, dict[Subject, list[_Turn]]] = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as stack:
        children = [(subject, await stack.enter_async_context(routers[subject])) for subject in subjects]
        calls = await stack.enter_async_context(store_calls(store))
        for _ in range(rounds):
            for given in ("tokens", "hashes"):
                await write_loads(store, workers)
                for subject, child in children:
                    turns[given][subject].append(await _take(child, given, store))
        longest = await calls.longest()
    name = f"{workers:,} workers, {holders} holders, {BLOCKS} blocks"
    rows = []
    for given, by_subject in turns.items():

        def pick(
            field: Callable[[_Turn], float], of: dict[Subject, list[_Turn]] = by_subject
        ) -> dict[Subject, list[float]]:
            return {subject: [field(turn) for turn in taken] for subject, taken in of.items()}

        budgeted = holders == 8 and given == "tokens"
        rows += [
            Comparison(f"choose and reserve from {given}, {name}, p50", "ms", pick(lambda turn: turn.p50_ms)),
            Comparison(f"choose and reserve from {given}, {name}, p99", "ms", pick(lambda turn: turn.p99_ms)),
            Comparison(f"  {CONCURRENCY} at a time", "choices/s", pick(lambda turn: turn.rate)),
            Comparison(
                "  CPU time of the router for each",
                "ms",
                pick(lambda turn: turn.router_ms),
                ROUTER_MS if budgeted else None,
            ),
            Comparison(
                "  CPU time of the store for each",
                "ms",
                {Subject.OURS: pick(lambda turn: turn.store_ms)[Subject.OURS]},
                STORE_MS if budgeted else None,
            ),
        ]
    if longest is not None:
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", {Subject.OURS: [longest.ms]}, CALL_MS))
    return rows


async def _take(child: Child, given: str, store: Store) -> _Turn:
    """Measure latency, then rate. The store's CPU time is its total, because the peer does not use the store."""
    await child.start(f"latency {given}")
    (line,) = await child.results()
    latency = json.loads(line)
    before_s = await store_cpu_s(store)
    await child.start(f"rate {given}")
    (line,) = await child.results()
    store_s = await store_cpu_s(store) - before_s
    rate = json.loads(line)
    choices = rate["choices"]
    return _Turn(
        latency["p50_ms"],
        latency["p99_ms"],
        choices / rate["seconds"],
        rate["cpu_s"] * 1e3 / choices,
        store_s * 1e3 / choices,
    )


def _our_router(store: Store, source: PromptSource) -> AbstractAsyncContextManager[Child]:
    return child_process("benchmarks.peer.ours.choices_process", [store.url, str(source.workers), str(source.holders)])


@asynccontextmanager
async def _their_router(source: PromptSource) -> AsyncIterator[Child]:
    """Run the peer's router, with an engine for each worker that holds blocks, and one silent engine for all others."""
    holding = sorted({worker for depths in source.depths for worker in depths})
    with Engines(len(holding) + 1) as engines:
        sockets = {str(worker): engines.endpoints[i] for i, worker in enumerate(holding)}
        args = [str(source.workers), str(source.holders), engines.endpoints[-1], json.dumps(sockets)]

        def publish() -> None:
            engines.wait_for_subscribers(len(holding))
            for tokens, depths in held_prefixes(source):
                for worker, depth in depths.items():
                    payload, _ = encode_stored(tokens[: depth * BLOCK_SIZE], BLOCK_SIZE)
                    engines.publish(holding.index(worker), payload)

        published = asyncio.create_task(asyncio.to_thread(publish))
        async with dynamo_child("benchmarks.peer.dynamo.choices_process", args, ready_s=CHILD_READY_S) as child:
            await published
            yield child
