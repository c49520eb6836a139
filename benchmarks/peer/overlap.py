"""Overlap of ready hashes, by length of the prompt, held by 64 workers to equal and to different depths.

Shared: what a router process asks another process for: `RouterClient.overlap` (the store), and the peer's indexer over HTTP.
In process: the in-memory index, and the peer's radix tree.
"""

import asyncio
import json
from collections import defaultdict

from benchmarks.child_processes import child_process
from benchmarks.peer.comparison import Comparison
from benchmarks.peer.dynamo_process import dynamo_child, dynamo_indexer
from benchmarks.peer.engines import Engines, encode_stored
from benchmarks.peer.pool import write_pool
from benchmarks.peer.prompts import BLOCK_SIZE, OVERLAP_HOLDERS, overlap_cases
from benchmarks.store_calls import store_calls
from kvatlas.store.connection import Store

ROUNDS = 3
CHILD_READY_S = 120


async def measure(store: Store, rounds: int = ROUNDS) -> list[Comparison]:
    cases = overlap_cases()
    await write_pool(store, OVERLAP_HOLDERS, [(case.tokens, case.depths) for case in cases])

    def publish(engines: Engines) -> None:
        engines.wait_for_subscribers()
        for case in cases:
            for worker, depth in case.depths.items():
                engines.publish(worker, encode_stored(case.tokens[: depth * BLOCK_SIZE], BLOCK_SIZE)[0])

    figures: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with Engines(OVERLAP_HOLDERS) as engines:
        async with dynamo_indexer(engines.endpoints, BLOCK_SIZE) as indexer:
            await asyncio.to_thread(publish, engines)
            async with (
                child_process("benchmarks.peer.our_overlap", [store.url], ready_s=CHILD_READY_S) as ours,
                dynamo_child("benchmarks.peer.their_overlap", [str(indexer.port)], ready_s=CHILD_READY_S) as theirs,
                store_calls(store) as calls,
            ):
                for _ in range(rounds):
                    for number in range(len(cases)):
                        for who, child in (("ours", ours), ("theirs", theirs)):
                            await child.start(str(number))
                            (line,) = await child.results()
                            figures[who, number].append(json.loads(line))
                longest = await calls.longest()
    rows = []
    for field, where, unit in (("shared_ms", "shared", "ms"), ("in_process_us", "in process", "us")):
        for number, case in enumerate(cases):
            depth = "different" if case.different else "equal"
            name = f"overlap, {where}, {case.blocks:,} blocks, {OVERLAP_HOLDERS} holders of {depth} depth, p50"
            pair = ([turn[field] for turn in figures[who, number]] for who in ("ours", "theirs"))
            rows.append(Comparison(name, unit, *pair))
    if longest is not None:
        rows.append(Comparison(f"  longest store call: {longest.command}", "ms", [longest.ms], []))
    return rows
