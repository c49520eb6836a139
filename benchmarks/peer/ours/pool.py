"""A pool of workers in the store, as sidecars and indexers would have written it."""

import random
import time
from collections.abc import Mapping

from benchmarks.fleet_records import routable_record
from benchmarks.peer.prompts import BLOCK_SIZE, PromptSource
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

SCOPE = Scope("bench", "bench")


async def write_pool(store: Store, workers: int, held: list[tuple[list[int], Mapping[int, int]]]) -> None:
    """Empty the store, and write workers, some of which hold prompts: (token ids, number of blocks by worker
    number)."""
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    use = ScopeUse(SCOPE, BLOCK_SIZE)
    for tokens, depths in held:
        chain = extend_chain(tokens, BLOCK_SIZE)
        for worker, depth in depths.items():
            await index.put(use, worker_name(worker), Tier.HBM, chain[: HASH_BYTES * depth])
    await write_loads(store, workers)


async def write_loads(store: Store, workers: int) -> None:
    """Write each worker's current load, as publishers report it every second."""
    rng = random.Random(2)
    loads = [
        WorkerState(
            id=worker_name(number),
            sampled_us=time.time_ns() // 1_000,
            queued_prefill_tokens=rng.randrange(4_000),
            running_decodes=rng.randrange(32),
        )
        for number in range(workers)
    ]
    await FleetStore(store).write({load.id: routable_record(SCOPE, load) for load in loads})


def worker_name(number: int) -> str:
    return f"w{number:04}"


def held_prefixes(source: PromptSource) -> list[tuple[list[int], Mapping[int, int]]]:
    """The blocks that the workers of a prompt source hold."""
    return list(zip(source.prefixes, source.depths, strict=True))
