"""Overlap with marks: how much longer a lookup takes if holders have marks, and the duration of its longest call.

The data is written directly, because only its shape matters. `sparse`: the last mark is near the depth, as engines leave them;
`polluted`: other branches have marks at every offset of the last eight segments, and the holder's mark is far away.
"""

import random
from functools import partial
from typing import Any

from benchmarks.result import Result
from benchmarks.timing import quantile, time_async_calls
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.mark_lookup import HEAD_SUFFIX, SEGMENT
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import OverlapAnswer, pack_reach, unpack_reach
from kvatlas.store.connection import Store

SCOPE = Scope("bench", "bench")
LENGTHS = (512, 2_048, 8_192)
HOLDERS = (4, 16, 64, 256)
CALLS = 200
LONGEST_CALL_MS = 5.0
MOST_TIMES = 2.0
"""Budget: a lookup of 16 holders with marks takes at most this many times as long."""

_NO_MARKS = b"\x00\x96\x00\x00\x00\x00\x00\x00"


async def measure(store: Store) -> list[Result]:
    """Measure one shard with holders of different depths."""
    index = await open_redis_index(store, shards=1, writer=True)
    results: list[Result] = []
    seed = 0
    for blocks in LENGTHS:
        for holders in HOLDERS:
            seed += 1
            chain = extend_chain(range(seed * 10_000, seed * 10_000 + blocks), 1)
            name = f"overlap {blocks:,} blocks, {holders} holders of different depth"
            times = {}
            for shape in ("none", "sparse", "polluted"):
                await write_holders(store, chain, holders, shape)
                calls = [partial(index.overlap, SCOPE, chain, limit=blocks - 1)] * CALLS
                times[shape] = sorted(await time_async_calls(calls))
            ratio = quantile(times["sparse"], 0.5) / quantile(times["none"], 0.5)
            results.append(Result(f"{name}, no marks, p50", quantile(times["none"], 0.5) * 1e3, "ms"))
            results.append(
                Result(f"{name}, marks: times of no marks, p50", ratio, "x", MOST_TIMES if holders == 16 else None)
            )
            slowest = await _longest_call_ms(store, chain, blocks - 1)
            results.append(Result(f"{name}, polluted heads: longest call (CPU time)", slowest, "ms", LONGEST_CALL_MS))
    return results


async def _longest_call_ms(store: Store, chain: bytes, limit: int) -> float:
    """The store's CPU time for the longest call of a lookup."""
    k, functions = ShardKeys(0), IndexFunctions(store)
    lookup = [k.blocks(SCOPE.scope_id), k.meta, k.marked, k.marks(SCOPE.scope_id)]
    calls: list[tuple[str, list[str], list[bytes | int | str]]] = []
    answer = OverlapAnswer(*await functions.call_ro("kvatlas_overlap", lookup, [chain, SEGMENT, 0, limit]))
    calls.append(("kvatlas_overlap", lookup, [chain, SEGMENT, 0, limit]))
    at = answer.next
    while at:
        rest: list[bytes | int | str] = [chain[at * HASH_BYTES :], SEGMENT, "", 0]
        calls.append(("kvatlas_overlap", lookup, rest))
        more = OverlapAnswer(*await functions.call_ro("kvatlas_overlap", lookup, rest)).next
        at = at + more if more else 0
    left = answer.left
    while left:
        # as deep as the chain, where a holder's marks cost most
        tops = {number: min(below, len(chain) // HASH_BYTES) for number, below in unpack_reach(left).items()}
        args: list[bytes | int | str] = [chain, 0, limit, pack_reach(tops)]
        calls.append(("kvatlas_resume", lookup[2:], args))
        _, left = await functions.call_ro("kvatlas_resume", lookup[2:], args)
    longest = 0.0
    for function, keys, args in calls:
        before = await _store_cpu_s(store)
        for _ in range(20):
            await functions.call_ro(function, keys, args)
        longest = max(longest, (await _store_cpu_s(store) - before) / 20 * 1e3)
    return longest


async def _store_cpu_s(store: Store) -> float:
    info = await store.client.info("cpu")
    return float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])


async def write_holders(store: Store, chain: bytes, holders: int, shape: str) -> None:
    """Write the chain's blocks for `holders` holders, each to a different depth."""
    draw = random.Random(holders)
    hashes = [chain[at : at + 8] for at in range(0, len(chain), 8)]
    count, k = len(hashes), ShardKeys(0)
    await store.client.delete(k.blocks(SCOPE.scope_id), k.marks(SCOPE.scope_id), k.marked)
    depths = {number_bytes(i + 1): max(1, count * (i + 1) // holders) for i in range(holders)}
    blocks = {
        name: b"".join(number + b"\x01" for number, depth in depths.items() if depth > i)
        for i, name in enumerate(hashes)
    }
    marks: dict[bytes, list[bytes]] = {}
    heads: dict[bytes, dict[bytes, int]] = {}
    for number, depth in depths.items() if shape != "none" else ():
        if shape == "sparse":
            own = {depth - 1 - draw.randrange(min(depth, 12)), *(draw.randrange(depth) for _ in range(depth // 256))}
            others: set[int] = set()
        else:
            own, others = {draw.randrange(min(depth, SEGMENT))}, set(range(max(0, depth - 8 * SEGMENT), depth))
        for i in own:
            marks.setdefault(hashes[i], []).append(number)
        for i in own | others:
            head = heads.setdefault(hashes[i // SEGMENT * SEGMENT], {})
            head[number] = head.get(number, 0) | 1 << i % SEGMENT
    stored: dict[Any, Any] = {name: b"".join(sorted(numbers)) for name, numbers in marks.items()}
    for name, bits in heads.items():
        stored[name + HEAD_SUFFIX] = b"".join(n + bits[n].to_bytes(8, "big") for n in sorted(bits))
    async with store.client.pipeline(transaction=False) as pipeline:
        pipeline.hset(k.blocks(SCOPE.scope_id), mapping=blocks)
        if stored:
            pipeline.hset(k.marks(SCOPE.scope_id), mapping=stored)
            pipeline.hset(k.marked, mapping=dict.fromkeys(depths, _NO_MARKS))
        await pipeline.execute()
