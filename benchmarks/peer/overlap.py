"""Overlap of precomputed hashes, by prompt length, held by 64 workers to equal and to different depths.

Shared: a router process asks another process, by `RouterClient.overlap` (the store) and over HTTP (the peer's indexer). In
process: the in-memory index, and the peer's radix tree.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from benchmarks.child_processes import Child, child_process
from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.dynamo.processes import dynamo_child, dynamo_indexer
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.ours.pool import write_pool
from benchmarks.peer.prompts import BLOCK_SIZE, OVERLAP_HOLDERS, overlap_cases
from benchmarks.store_calls import store_calls
from kvatlas.store.connection import Store

ROUNDS = 3
CHILD_READY_S = 120
IN_PROCESS_US = {512: 4.0, 2_048: 10.0, 8_192: 30.0}
CALL_MS = 5.0


async def measure(store: Store, subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[Comparison]:
    cases = overlap_cases()
    await write_pool(store, OVERLAP_HOLDERS, [(case.tokens, case.depths) for case in cases])
    routers = {Subject.OURS: _our_router(store), Subject.THEIRS: _their_router()}
    turns: dict[int, dict[Subject, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as stack:
        children = [(subject, await stack.enter_async_context(routers[subject])) for subject in subjects]
        calls = await stack.enter_async_context(store_calls(store))
        for _ in range(rounds):
            for number in range(len(cases)):
                for subject, child in children:
                    await child.start(str(number))
                    (line,) = await child.results()
                    turns[number][subject].append(json.loads(line))
        longest = await calls.longest()
    rows = []
    for field, where, unit in (("shared_ms", "shared", "ms"), ("in_process_us", "in process", "us")):
        for number, case in enumerate(cases):
            depth = "different" if case.different else "equal"
            name = f"overlap, {where}, {case.blocks:,} blocks, {OVERLAP_HOLDERS} holders of {depth} depth, p50"
            figures = {subject: [turn[field] for turn in taken] for subject, taken in turns[number].items()}
            budget = IN_PROCESS_US[case.blocks] if where == "in process" and not case.different else None
            rows.append(Comparison(name, unit, figures, budget))
    if longest is not None:
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", {Subject.OURS: [longest.ms]}, CALL_MS))
    return rows


def _our_router(store: Store) -> AbstractAsyncContextManager[Child]:
    return child_process("benchmarks.peer.ours.overlap_process", [store.url], ready_s=CHILD_READY_S)


@asynccontextmanager
async def _their_router() -> AsyncIterator[Child]:
    with Engines(OVERLAP_HOLDERS) as engines:

        def publish() -> None:
            engines.wait_for_subscribers()
            for case in overlap_cases():
                for worker, depth in case.depths.items():
                    engines.publish(worker, encode_stored(case.tokens[: depth * BLOCK_SIZE], BLOCK_SIZE)[0])

        async with dynamo_indexer(engines.endpoints, BLOCK_SIZE) as indexer:
            await asyncio.to_thread(publish)
            args = [str(indexer.port)]
            async with dynamo_child("benchmarks.peer.dynamo.overlap_process", args, ready_s=CHILD_READY_S) as child:
                yield child
