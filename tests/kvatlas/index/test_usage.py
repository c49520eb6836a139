"""Resident bytes over time, compared with a model that knows when each block came and went."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from time import monotonic

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, connected_store

pytestmark = pytest.mark.anyio

BLOCK_BYTES = 1_000
IN_TIER = {Tier.HBM: BLOCK_BYTES, Tier.CPU_DRAM: 250}
SCOPES = [Scope("m", "m", None, "acme"), Scope("m", "m", "a", "acme"), Scope("m", "m", None, "globex")]
WORKERS = ["v", "w"]
Place = tuple[Scope, Tier]


@dataclass
class Naive:
    """Adds up each block's bytes over the time it was there."""

    now_s: float = 0.0
    held: dict[tuple[str, Scope, Tier], set[int]] = field(default_factory=lambda: defaultdict(set))
    used: dict[Place, float] = field(default_factory=lambda: defaultdict(float))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for (_, scope, tier), blocks in self.held.items():
            self.used[scope, tier] += len(blocks) * IN_TIER[tier] * seconds


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "remove", "clear", "retire", "sweep", "forget"]),
        st.sampled_from(WORKERS),
        st.sampled_from(SCOPES),
        st.sampled_from([Tier.HBM, Tier.CPU_DRAM]),
        st.integers(1, 5),
        st.integers(0, 100),
    ),
    max_size=30,
)


async def carry_out(index: ResidencyIndex, naive: Naive, step: tuple[str, str, Scope, Tier, int, int]) -> None:
    """Carry out one step in both."""
    kind, worker, scope, tier, blocks, _ = step
    hashes = b"".join(n.to_bytes(8, "little") for n in range(1, blocks + 1))
    if kind == "put":
        await index.put(ScopeUse(scope, 16, IN_TIER[tier]), worker, tier, hashes)
        naive.held[worker, scope, tier] |= set(range(1, blocks + 1))
    elif kind == "remove":
        await index.remove(scope, worker, tier, hashes)
        naive.held[worker, scope, tier] -= set(range(1, blocks + 1))
    elif kind in ("clear", "retire"):
        record = await index.record(worker)
        if kind == "clear":
            await index.clear_worker(worker)
        elif record is not None:
            await index.retire(worker, record.incarnation)
        for place in [place for place in naive.held if place[0] == worker]:
            del naive.held[place]
    elif kind == "sweep":
        for shard in range(index.shards):
            await index.sweep(shard, 10_000)
    else:
        await index.forget_scopes(0)


def assert_equal(found: dict[Place, float], expected: dict[Place, float], slack: Callable[[Place], float]) -> None:
    for place in found.keys() | expected.keys():
        assert found.get(place, 0.0) == pytest.approx(expected.get(place, 0.0), rel=1e-9, abs=slack(place)), place


async def used(index: ResidencyIndex) -> dict[Place, float]:
    """Usage by scope and tier."""
    return {(row.scope, row.tier): row.byte_seconds for row in await index.usage() if row.scope is not None}


@given(STEPS)
@settings(max_examples=200, deadline=None)
async def test_in_process_it_is_the_sum_of_each_block_s_time(
    steps: list[tuple[str, str, Scope, Tier, int, int]],
) -> None:
    naive = Naive()
    index = MemoryIndex(shards=2, clock=lambda: naive.now_s)
    for step in steps:
        await carry_out(index, naive, step)
        naive.pass_time(step[-1])
        assert_equal(await used(index), naive.used, lambda _: 1e-6)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An empty store, on Valkey and on Redis 8."""
    async with connected_store(store_url, wait=False) as opened:
        await opened.client.flushall()
        yield opened


async def pass_stored_time(store: Store, index: RedisIndex, seconds: int) -> None:
    """Let everything in the store look this much older: only holders have a time, since when they are active."""
    for shard in range(index.shards):
        key = ShardKeys(shard).holders
        for holder, entry in (await store.client.hgetall(key)).items():
            state, worker, *times = msgpack.unpackb(entry, raw=True)
            moved = [state, worker, *(int(ms) - seconds * 1_000 for ms in times)]
            await store.client.hset(key, holder, msgpack.packb(moved, use_bin_type=False))


async def test_each_tier_of_many_scopes_has_its_size_and_is_forgotten(store: Store) -> None:
    """They are read from a store in pages, which may end within a scope's tiers."""
    index = await open_redis_index(store, writer=True)
    scopes, hashes = [Scope("m", "m", None, f"tenant{n}") for n in range(130)], (1).to_bytes(8, "little")
    for scope in scopes:
        for tier in Tier:
            await index.put(ScopeUse(scope, 16, 100 + tier), "w", tier, hashes)
    await pass_stored_time(store, index, 10**6)
    found = await used(index)
    assert found == {(scope, tier): pytest.approx((100 + tier) * 10**6, rel=1e-3) for scope in scopes for tier in Tier}
    await index.clear_worker("w")
    for shard in range(index.shards):
        await index.sweep(shard, 10_000)
    assert (await used(index)).keys() == found.keys()


@pytest.mark.parametrize("seed", range(5))
async def test_in_the_store_it_is_the_same(seed: int, store: Store) -> None:
    random, naive, began_s = Random(seed), Naive(), monotonic()
    index = await open_redis_index(store, shards=2, writer=True)
    kinds = ["put", "put", "put", "remove", "clear", "retire", "sweep", "forget"]
    for _ in range(25):
        tier, blocks, seconds = random.choice([Tier.HBM, Tier.CPU_DRAM]), random.randint(1, 5), random.randint(0, 10**6)
        step = random.choice(kinds), random.choice(WORKERS), random.choice(SCOPES), tier, blocks, seconds
        await carry_out(index, naive, step)
        if step[0] == "forget":  # a process registers no scope twice within a second, and this one was not idle for one
            index = await open_redis_index(store, writer=True)
        naive.pass_time(seconds)
        await pass_stored_time(store, index, seconds)
    real = 5 * len(WORKERS) * BLOCK_BYTES * (monotonic() - began_s + 1)
    assert_equal(await used(index), naive.used, lambda _: real)
    assert sum(naive.used.values()) > 1_000 * real
