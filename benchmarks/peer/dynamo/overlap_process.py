"""A process that requests overlaps from the peer: `python -m benchmarks.peer.dynamo.overlap_process PORT` of its indexer.

It is ready when the indexer holds what the engines published. A turn is the number of a case; it prints {shared_ms,
in_process_us}: the medians of an HTTP query to the indexer and of `RadixTree.find_matches`.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import count

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from benchmarks.child_processes import take_turns
from benchmarks.peer.dynamo.queries import DynamoQueries, depths_of, signed
from benchmarks.peer.prompts import BLOCK_SIZE, OverlapCase, overlap_cases
from benchmarks.peer.turns import OVERLAP_CALLS
from benchmarks.timing import quantile, time_calls

FILLED_S = 60


async def _main(port: int) -> None:
    queries = DynamoQueries(port)
    cases = overlap_cases()
    hashes = [compute_block_hash_for_seq(case.tokens, BLOCK_SIZE) for case in cases]
    tree = _tree(cases, hashes)
    async with asyncio.timeout(FILLED_S):
        for case in cases:
            while depths_of(queries.by_tokens(case.tokens), BLOCK_SIZE) != case.depths:
                await asyncio.sleep(0.1)

    async def turn(line: str) -> Sequence[str]:
        case, locals_ = cases[int(line)], hashes[int(line)]
        by_worker = {worker: depth for (worker, _), depth in tree.find_matches(locals_).scores.items()}
        if by_worker != case.depths:
            raise RuntimeError(f"overlap of {case.blocks} blocks: {by_worker}; expected {case.depths}")
        shared = time_calls([partial(queries.by_hashes, [signed(value) for value in locals_])] * OVERLAP_CALLS)
        inside = time_calls([lambda: tree.find_matches(locals_).scores] * OVERLAP_CALLS)
        return [json.dumps({"shared_ms": quantile(shared, 0.5) * 1e3, "in_process_us": quantile(inside, 0.5) * 1e6})]

    await take_turns(turn)


def _tree(cases: list[OverlapCase], hashes: list[list[int]]) -> RadixTree:
    tree = RadixTree()
    numbers = count(1)
    for case_number, (case, locals_) in enumerate(zip(cases, hashes, strict=True)):
        blocks = [{"block_hash": (case_number << 32) + i, "tokens_hash": value} for i, value in enumerate(locals_)]
        for worker, depth in case.depths.items():
            stored = {"stored": {"parent_hash": None, "blocks": blocks[:depth]}}
            tree.apply_event(worker, json.dumps({"event_id": next(numbers), "data": stored}).encode())
    return tree


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
