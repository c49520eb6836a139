"""How long a booked choice takes, by what the workers hold: a few holders, all alike, all different, half of them evicted, two
speeds of engines.

A prompt has 512 blocks, of which 448 are one of four shared prefixes. Alike: all hold a system prompt, four hold more.
Different: each holds a different part. Evicted: half hold a quarter, the others different parts. The first token and the end of
each choice are reported.
"""

import os
import random
from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter, process_time, time_ns

from rich.table import Table

from benchmarks.fleet_records import BLOCK_SIZE, routable_record
from benchmarks.stores import store_cpu_s
from benchmarks.timing import quantile
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from router_client import Prompt, RouterClient, RouterSettings

SCOPE = Scope("bench", "bench")
SHAPES = ("8 holders", "all alike", "all different", "half evicted", "two speeds")
WORKERS = (64, 256, 1_000)
BLOCKS, SHARED, PREFIXES = 512, 448, 4
CALLS, BATCHES = 16, 6
SLOW = EngineRates(prefill_us_per_token=80.0, tpot_base_us=14_000.0)


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """A row of the table. `p50_ms`: median time of a choice. `router_us`, `store_us`: CPU time of a choice and the
    reports of its first token and its end, in the batch that took the least."""

    workers: int
    shape: str
    p50_ms: float
    router_us: float
    store_us: float


async def measure(store: Store) -> Table:
    """Measure every shape at every size."""
    table = Table("workers", "held", "p50 ms", "router us", "store us", title=f"route by what is held, {BLOCKS} blocks")
    for workers in WORKERS:
        for shape in SHAPES:
            row = await measure_shape(store, workers, shape)
            table.add_row(f"{workers:,}", shape, f"{row.p50_ms:.2f}", f"{row.router_us:.0f}", f"{row.store_us:.0f}")
    return table


async def measure_shape(store: Store, workers: int, shape: str) -> ShapeFigures:
    rng = random.Random(f"{workers}/{shape}")
    chains = await _fill(store, rng, workers, shape)
    slow = {_name(number): SLOW for number in range(0, workers, 4)} if shape == "two speeds" else {}
    settings = RouterSettings(profile=EngineProfile(by_worker=slow))
    async with RouterClient.open(store.url, settings, wait=False) as router:
        times: list[float] = []
        router_s: list[float] = []
        store_s: list[float] = []
        for _ in range(1 + BATCHES):
            await _write_load(store, workers)
            await sleep(0.25)  # until routers have read it
            await _route(router, chains, 1)
            store_before_s, before_s = await store_cpu_s(store), process_time()
            times += await _route(router, chains, CALLS)
            router_s.append(process_time() - before_s)
            store_s.append(await store_cpu_s(store) - store_before_s)
    p50_ms = quantile(sorted(times[CALLS:]), 0.5) * 1e3
    return ShapeFigures(workers, shape, p50_ms, min(router_s[1:]) / CALLS * 1e6, min(store_s[1:]) / CALLS * 1e6)


async def _route(router: RouterClient, chains: list[bytes], calls: int) -> list[float]:
    times = []
    for number in range(calls):
        hashes = chains[number % PREFIXES] + os.urandom((BLOCKS - SHARED) * HASH_BYTES)
        prompt = Prompt.of_hashes(SCOPE, hashes, BLOCK_SIZE, input_tokens=BLOCKS * BLOCK_SIZE + 7)
        began = perf_counter()
        choice = await router.reserve(prompt)
        times.append(perf_counter() - began)
        await choice.first_token()
        await choice.done()
    return times


async def _fill(store: Store, rng: random.Random, workers: int, shape: str) -> list[bytes]:
    """Empty the store, and write what the workers hold into it. Returns the prefixes' hashes."""
    await store.client.flushall()
    index, use = await open_redis_index(store, writer=True), ScopeUse(SCOPE, BLOCK_SIZE)
    chains = []
    for _ in range(PREFIXES):
        chain = extend_chain([rng.randrange(100_000) for _ in range(SHARED * BLOCK_SIZE)], BLOCK_SIZE)
        for number, depth in _depths(rng, workers, shape).items():
            await index.put(use, _name(number), Tier.HBM, chain[: HASH_BYTES * depth])
        chains.append(chain)
    return chains


def _depths(rng: random.Random, workers: int, shape: str) -> Mapping[int, int]:
    order = rng.sample(range(workers), workers)
    few = dict(zip(order, range(SHARED, SHARED - 8 * 40, -40), strict=False))
    if shape in ("8 holders", "two speeds"):
        return few
    if shape == "all alike":
        return dict.fromkeys(range(workers), 128) | dict(list(few.items())[:4])
    if shape == "all different":
        return {number: max(1, SHARED * (rank + 1) // workers) for rank, number in enumerate(order)}
    half = workers // 2
    cut = {number: max(1, SHARED * (rank + 1) // half) for rank, number in enumerate(order[:half])}
    return dict.fromkeys(order[half:], SHARED // 4) | cut


async def _write_load(store: Store, workers: int) -> None:
    rng = random.Random(2)
    loads = [
        WorkerState(
            id=_name(number),
            sampled_us=time_ns() // 1_000,
            queued_prefill_tokens=rng.randrange(4_000),
            running_decodes=rng.randrange(32),
        )
        for number in range(workers)
    ]
    await FleetStore(store).write({load.id: routable_record(SCOPE, load) for load in loads})


def _name(number: int) -> str:
    return f"w{number:04}"
