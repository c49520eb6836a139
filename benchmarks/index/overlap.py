"""Overlap of precomputed hashes, by prompt length, number of holders, their depths, and shards; and in process."""

import random
from functools import partial

from benchmarks.result import Result
from benchmarks.timing import quantile, time_async_calls, time_calls
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

SCOPE = Scope("bench", "bench")
BLOCK_SIZE = 16
USE = ScopeUse(SCOPE, BLOCK_SIZE)
LENGTHS = (64, 512, 2_048, 8_192)
HOLDERS = (1, 8, 64, 256)
CALLS = 300

SHARED_MS = {  # (blocks, holders, all depths different): budget
    (512, 64, False): 0.12,
    (2_048, 64, False): 0.15,
    (8_192, 64, False): 0.25,
    (512, 64, True): 0.15,
    (2_048, 64, True): 0.25,
    (8_192, 64, True): 0.6,
    (2_048, 256, True): 0.7,
}
IN_PROCESS_US = {(512, 64, False): 4.0, (2_048, 64, False): 10.0, (8_192, 64, False): 30.0}


async def measure(store: Store, shards: int) -> list[Result]:
    """Measure the shared index with this many shards and (with one) the in-process index."""
    await store.client.flushall()
    index = await open_redis_index(store, shards=shards, writer=True)
    memory = MemoryIndex()
    results: list[Result] = []
    seed = 0
    for blocks in LENGTHS:
        for holders in HOLDERS:
            for different in (False, True):
                if different and holders == 1:
                    continue
                seed += 1
                chain = _chain_of(seed, blocks)
                await _store_holders(index, chain, holders, different)
                who = "1 holder" if holders == 1 else f"{holders} holders"
                name = f"overlap {blocks:,} blocks, {who} of {'different' if different else 'equal'} depth"
                key = (blocks, holders, different)
                times = await time_async_calls([partial(index.overlap, SCOPE, chain)] * CALLS)
                budget = SHARED_MS.get(key) if shards == 1 else None
                where = "1 shard" if shards == 1 else f"{shards} shards"
                results.append(Result(f"{name}, {where}, p50", quantile(times, 0.5) * 1e3, "ms", budget))
                if key == (512, 64, False):
                    results.append(Result(f"{name}, {where}, p99", quantile(times, 0.99) * 1e3, "ms"))
                    found = await index.overlap(SCOPE, chain)
                    times = time_calls([found.depths] * CALLS)
                    results.append(Result("depth by worker from that answer, p50", quantile(times, 0.5) * 1e3, "ms"))
                if shards == 1 and key in IN_PROCESS_US:
                    await _store_holders(memory, chain, holders, different)
                    times = time_calls([partial(memory.overlap_now, SCOPE, chain)] * CALLS)
                    budget = IN_PROCESS_US[key]
                    results.append(Result(f"{name}, in process, p50", quantile(times, 0.5) * 1e6, "us", budget))
    cold = _chain_of(seed + 1, 8_192)
    times = await time_async_calls([partial(index.overlap, SCOPE, cold)] * CALLS)
    results.append(Result(f"overlap, a miss ({shards} shards), p50", quantile(times, 0.5) * 1e3, "ms", 0.1))
    return results


def _chain_of(seed: int, blocks: int) -> bytes:
    return extend_chain(range(seed * 200_000, seed * 200_000 + blocks * BLOCK_SIZE), BLOCK_SIZE)


async def _store_holders(index: ResidencyIndex, chain: bytes, holders: int, different: bool) -> None:
    """Store the chain for each holder: all of it, or to a `different` depth for each."""
    blocks = len(chain) // 8
    order = list(range(1, holders + 1))
    random.Random(holders).shuffle(order)
    for worker, rank in enumerate(order):
        depth = max(1, blocks * rank // holders) if different else blocks
        await index.put(USE, f"holder-{worker}", Tier.HBM, chain[: 8 * depth])
