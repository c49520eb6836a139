"""A router process of kvatlas that requests overlaps: `python -m benchmarks.peer.ours.overlap_process REDIS_URL`.

A turn is the number of a case; it prints {shared_ms, in_process_us}: the medians of `RouterClient.overlap` and of the
in-process index.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from benchmarks.child_processes import take_turns
from benchmarks.peer.ours.pool import SCOPE, worker_name
from benchmarks.peer.prompts import BLOCK_SIZE, OverlapCase, overlap_cases
from benchmarks.peer.turns import OVERLAP_CALLS
from benchmarks.timing import quantile, time_async_calls, time_calls
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.index.memory.index import MemoryIndex
from router_client import Prompt, RouterClient, RouterSettings


async def _main(url: str) -> None:
    cases = overlap_cases()
    chains = [extend_chain(case.tokens, BLOCK_SIZE) for case in cases]
    memory = MemoryIndex()
    for case, chain in zip(cases, chains, strict=True):
        for worker, depth in case.depths.items():
            use = ScopeUse(SCOPE, BLOCK_SIZE)
            await memory.put(use, worker_name(worker), Tier.HBM, chain[: HASH_BYTES * depth])
    async with RouterClient.open(url, RouterSettings(deadline_ms=None), wait=False) as router:

        async def turn(line: str) -> Sequence[str]:
            case, chain = cases[int(line)], chains[int(line)]
            # one token more than the blocks have: engines recompute only that one, so all blocks are usable
            prompt = Prompt.of_hashes(SCOPE, chain, BLOCK_SIZE, input_tokens=len(case.tokens) + 1)
            found = {worker.worker_id: worker.resident_blocks for worker in await router.overlap(prompt)}
            _check(case, found)
            _check(case, memory.overlap_now(SCOPE, chain).depths())
            shared = await time_async_calls([partial(router.overlap, prompt)] * OVERLAP_CALLS)
            inside = time_calls([partial(memory.overlap_now, SCOPE, chain)] * OVERLAP_CALLS)
            return [
                json.dumps({"shared_ms": quantile(shared, 0.5) * 1e3, "in_process_us": quantile(inside, 0.5) * 1e6})
            ]

        await take_turns(turn)


def _check(case: OverlapCase, found: dict[str, int]) -> None:
    expected = {worker_name(worker): depth for worker, depth in case.depths.items()}
    if found != expected:
        raise RuntimeError(f"overlap of {case.blocks} blocks: {found}; expected {expected}")


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
