"""Bytes per block in the store: with one holder, and for each additional one."""

import os

from benchmarks.result import Result
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

USE = ScopeUse(Scope("bench", "bench"), 16)
BLOCKS = 1 << 17
HOLDERS = 16
"""Enough to average out the steps of the store's allocator (16 bytes)."""


async def measure(store: Store) -> list[Result]:
    await store.client.execute_command("FLUSHALL", "SYNC")  # memory freed later would distort the figures
    index = await open_redis_index(store, writer=True)
    hashes = os.urandom(8 * BLOCKS)
    used = [await _used_bytes(store)]
    for holder in range(HOLDERS):
        await index.put(USE, f"holder-{holder}", Tier.HBM, hashes)
        used.append(await _used_bytes(store))
    return [
        Result("memory a block with one holder", (used[1] - used[0]) / BLOCKS, "bytes", 45),
        Result(
            f"memory for each further holder, up to {HOLDERS}",
            (used[HOLDERS] - used[1]) / (HOLDERS - 1) / BLOCKS,
            "bytes",
            4,
        ),
    ]


async def _used_bytes(store: Store) -> int:
    return int((await store.client.info("memory"))["used_memory"])
