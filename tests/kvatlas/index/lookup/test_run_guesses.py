"""Lookups first probe where an earlier one with the same start found that runs begin and end: one step suffices if they still
do, and the result is exact whatever the guess."""

import random
from collections.abc import AsyncIterator

import pytest

from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.blocks.residency import ShardRuns
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.memory.block_table import BlockTable
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import OverlapAnswer
from kvatlas.index.run_guesses import RunGuesses
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.lookup.test_gallop import ACTIVE, KEYS, PACKED, values

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "m")
SHARD = ShardKeys(0)


def chain(seed: int, blocks: int) -> bytes:
    return pack_hashes([seed * 1_000_000 + at for at in range(blocks)])


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    store = await open_store(fresh_valkey, wait=False)
    yield store
    await store.close()


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, shards=1, writer=True)


async def count_reads(store: Store) -> int:
    stats = await store.client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hmget", "hget"))


# ------------------------------------------------------------ what is kept


def test_the_guess_is_that_of_the_longest_start_that_is_known() -> None:
    guesses = RunGuesses()
    short, long = chain(1, 64), chain(1, 300)
    guesses.keep(long, [100, 60], b"")
    assert guesses.find(short) == pack_places(99, 100, 159, 160)
    assert guesses.find(long + chain(2, 200)) == pack_places(99, 100, 159, 160)
    guesses.keep(short, [64], guesses.find(short))
    assert guesses.find(short) == pack_places(63, 64)
    assert guesses.find(long) == pack_places(99, 100, 159, 160)
    assert guesses.find(chain(3, 300)) == guesses.find(chain(1, 63)) == b""


def test_a_wrong_guess_is_dropped() -> None:
    guesses = RunGuesses()
    whole = chain(1, 300)
    guesses.keep(whole, [100, 160], b"")
    guesses.keep(whole, [70], guesses.find(whole))
    assert guesses.find(whole) == pack_places(69, 70)
    guesses.keep(whole, [], guesses.find(whole))
    assert guesses.find(whole) == b""
    guesses.keep(whole, [200], b"")
    guesses.keep(whole, [1] * 129, guesses.find(whole))
    assert guesses.find(whole) == b""


def pack_places(*places: int) -> bytes:
    return b"".join(place.to_bytes(4, "big") for place in places)


def test_starts_are_bounded() -> None:
    guesses = RunGuesses(most_starts=10)
    for seed in range(50):
        guesses.keep(chain(seed, 128), [128], b"")
    assert len(guesses) <= 10
    assert guesses.find(chain(49, 128)) == pack_places(127, 128)
    assert guesses.find(chain(1, 128)) == b""


# ------------------------------------------------------------ what is found


async def test_any_guess_finds_what_a_walk_finds(store: Store, index: RedisIndex) -> None:
    rng, functions, blocks = random.Random(7), IndexFunctions(store), SHARD.blocks(SCOPE.scope_id)
    keys = [blocks, SHARD.meta, SHARD.marked, SHARD.marks(SCOPE.scope_id)]
    for _ in range(150):
        depth_of = {number: rng.randrange(401) for number in rng.sample(sorted(ACTIVE), rng.randrange(9))}
        leftover = [(rng.randrange(400), rng.randrange(100, 105)) for _ in range(rng.randrange(8))]
        held = {key: value for key, value in zip(KEYS, values(depth_of, leftover, 400), strict=False) if value}
        await store.client.delete(blocks)
        if held:
            await store.client.hset(blocks, mapping=held)
        count = rng.choice([1, 2, 64, rng.randrange(1, 513), 512])
        near = [max(0, depth + rng.randrange(-2, 2)) for depth in depth_of.values()]
        guess = sorted({*rng.sample(range(600), rng.randrange(12)), *rng.sample(near, rng.randrange(len(near) + 1))})
        packed = PACKED[: count * HASH_BYTES]
        answer = OverlapAnswer(
            *await functions.call_ro("kvatlas_overlap", keys, [packed, 64, "", 0, pack_places(*guess)])
        )
        expected = {ACTIVE[number]: min(depth, count) for number, depth in depth_of.items() if depth}
        assert ShardRuns(answer.values, answer.lengths, ACTIVE).depths() == expected, (depth_of, leftover, count, guess)


async def test_a_second_lookup_of_a_start_reads_once(store: Store, index: RedisIndex) -> None:
    use, whole = ScopeUse(SCOPE, 16), chain(5, 512)
    depths = {f"w{number}": 56 * number for number in range(1, 9)}
    for worker, depth in depths.items():
        await index.put(use, worker, Tier.HBM, whole[: depth * HASH_BYTES])
    reads = []
    for tail in range(3):
        asked = whole[: 448 * HASH_BYTES] + chain(10 + tail, 64)
        await store.client.config_resetstat()
        assert (await index.overlap(SCOPE, asked, verify=False)).depths() == depths
        reads.append(await count_reads(store))
    first, second, third = reads
    assert second == third <= 3 < first  # the version, the first block, and all others
    # changes are found all the same, and known from then on
    await index.put(use, "w1", Tier.HBM, whole[: 400 * HASH_BYTES])
    await index.put(use, "w8", Tier.HBM, whole)
    depths |= {"w1": 400, "w8": 512}
    assert (await index.overlap(SCOPE, whole, verify=True)).depths() == depths
    await store.client.config_resetstat()
    found = await index.overlap(SCOPE, whole)
    assert found.depths() == depths and await count_reads(store) <= 3


async def test_a_second_lookup_of_64_runs_reads_once(store: Store, index: RedisIndex) -> None:
    use, whole = ScopeUse(SCOPE, 16), chain(8, 512)
    depths = {f"w{number}": 8 * number for number in range(1, 65)}
    for worker, depth in depths.items():
        await index.put(use, worker, Tier.HBM, whole[: depth * HASH_BYTES])
    assert (await index.overlap(SCOPE, whole)).depths() == depths
    await store.client.config_resetstat()
    assert (await index.overlap(SCOPE, whole)).depths() == depths
    assert await count_reads(store) <= 3  # the version, the first block, and all others


def test_the_memory_index_reads_where_runs_ended() -> None:
    blocks = BlockTable()
    keys = [chain(9, 512)[at : at + HASH_BYTES] for at in range(0, 512 * HASH_BYTES, HASH_BYTES)]
    read: list[bytes] = []

    class CountedReads(dict[bytes, bytes]):
        def get(self, key: bytes, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
            read.append(key)
            return super().get(key, default)

    depths = {number: 8 * number for number in range(1, 65)}
    held = {key: [number for number, depth in depths.items() if at < depth] for at, key in enumerate(keys)}
    values = {key: b"".join(number_bytes(number) + b"\1" for number in numbers) for key, numbers in held.items()}
    blocks.blocks[SCOPE.scope_id] = CountedReads(values)
    blocks.active = {number: f"w{number}" for number in depths}
    counts = []
    for _ in range(2):
        read.clear()
        assert blocks.overlap(SCOPE.scope_id, b"".join(keys)).depths() == {
            f"w{n}": depth for n, depth in depths.items()
        }
        counts.append(len(read))
    assert counts[1] <= 2 * len(depths) < counts[0]


async def test_more_changes_than_one_call_may_look_at_are_found(store: Store, index: RedisIndex) -> None:
    """Values with leftover retired holders differ in every block of an interval between two guesses."""
    blocks, whole = SHARD.blocks(SCOPE.scope_id), chain(3, 20_000)
    keys = [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]
    active = number_bytes(1) + b"\1"
    held = {key: active + number_bytes(100 + at) + b"\1" for at, key in enumerate(keys)}
    await store.client.hset(blocks, mapping=held)
    keys_of_call = [blocks, SHARD.meta, SHARD.marked, SHARD.marks(SCOPE.scope_id)]
    values, at, calls = list[bytes](), 0, 0
    while at or not calls:
        arguments = [whole[at * HASH_BYTES :], 64, "", 0, pack_places(19_999 - at)]
        answer = OverlapAnswer(*await IndexFunctions(store).call_ro("kvatlas_overlap", keys_of_call, arguments))
        assert set(answer.lengths) == {1}
        values, at, calls = [*values, *answer.values], at + answer.next if answer.next else 0, calls + 1
    assert values == list(held.values())
    assert calls > 10, "one call does bounded work"


async def test_a_lookup_of_another_end_is_exact(index: RedisIndex) -> None:
    use, whole = ScopeUse(SCOPE, 16), chain(6, 1_000)
    await index.put(use, "long", Tier.HBM, whole)
    await index.put(use, "short", Tier.HBM, whole[: 70 * HASH_BYTES])
    for blocks in (1_000, 64, 70, 71, 999, 130, 1):
        found = await index.overlap(SCOPE, whole[: blocks * HASH_BYTES], verify=True)
        assert found.depths() == {"long": blocks, "short": min(70, blocks)} and not found.differences
    other = whole[: 640 * HASH_BYTES] + chain(7, 300)
    found = await index.overlap(SCOPE, other, verify=True)
    assert found.depths() == {"long": 640, "short": 70} and not found.differences
