"""What direct writes pin is kept exactly, by block, worker and tier."""

import pytest

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.residency import Residency
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope, shard_of
from kvatlas.index.holder_entries import MAX_HOLDER
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from kvatlas.index.redis.keys import ShardKeys
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE, OTHER = Scope("model", "tokenizer"), Scope("model", "tokenizer", "adapter")
USE, OTHER_USE = ScopeUse(SCOPE, 4), ScopeUse(OTHER, 4)
CHAIN = extend_chain(range(4 * 6), 4)
HASHES = unpack_hashes(CHAIN)


def blocks(first: int, end: int) -> bytes:
    return CHAIN[first * HASH_BYTES : end * HASH_BYTES]


async def pinned(index: ResidencyIndex, worker_id: str, tier: Tier, scope: Scope = SCOPE) -> list[int]:
    """Numbers of the worker's blocks that are pinned in the tier, by every query alike."""
    found = [residency async for residency in index.snapshot(worker_id)]

    def those_of(some: list[Residency]) -> list[int]:
        mine = [one for one in some if one.pinned and (one.worker_id, one.tier, one.scope) == (worker_id, tier, scope)]
        return sorted(HASHES.index(one.sequence_hash) for one in mine)

    numbers = those_of(found)
    located = [one for value in HASHES for one in await index.locate(scope, value)]
    followed = [one for value in [None, *HASHES] for one in await index.children(scope, value)]
    assert those_of(located) == those_of(followed) == numbers
    return numbers


async def test_a_pin_is_of_one_block_worker_tier_and_scope(index: ResidencyIndex) -> None:
    await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
    await index.put(USE, "w", Tier.CPU_DRAM, blocks(0, 3))
    await index.put(OTHER_USE, "w", Tier.HBM, blocks(0, 2))
    await index.put(USE, "v", Tier.HBM, blocks(0, 5))
    assert await pinned(index, "w", Tier.HBM) == [0, 1, 2, 3, 4]
    assert await pinned(index, "w", Tier.CPU_DRAM) == []
    assert await pinned(index, "w", Tier.HBM, OTHER) == []
    assert await pinned(index, "v", Tier.HBM) == []


async def test_a_later_put_says_it_anew(index: ResidencyIndex) -> None:
    await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
    await index.put(USE, "w", Tier.CPU_DRAM, blocks(0, 5), pinned=True)
    await index.put(USE, "w", Tier.HBM, blocks(0, 2))
    assert await pinned(index, "w", Tier.HBM) == [2, 3, 4]
    assert await pinned(index, "w", Tier.CPU_DRAM) == [0, 1, 2, 3, 4]
    await index.put(USE, "w", Tier.HBM, blocks(1, 3), pinned=True)
    assert await pinned(index, "w", Tier.HBM) == [1, 2, 3, 4]


async def test_a_removed_block_is_pinned_no_more(index: ResidencyIndex) -> None:
    for tier in (Tier.HBM, Tier.CPU_DRAM):
        await index.put(USE, "w", tier, blocks(0, 5), pinned=True)
    await index.remove(SCOPE, "w", Tier.HBM, blocks(3, 5))
    await index.remove(SCOPE, "w", None, blocks(4, 5))
    source = MessageSource("w")
    record = await index.record("w")
    assert record is not None
    source.incarnation, source.seq = record.incarnation, record.seq
    for tier in (Tier.HBM, Tier.CPU_DRAM):  # by messages, which don't mention pins
        await apply_messages(index, source.store(SCOPE, blocks(0, 5), tier))
    assert await pinned(index, "w", Tier.HBM) == [0, 1, 2]
    assert await pinned(index, "w", Tier.CPU_DRAM) == [0, 1, 2, 3]


async def test_a_clear_and_a_new_incarnation_leave_nothing_pinned(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    for _ in range(2):
        await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
        await index.clear_worker("w")
        assert await pinned(index, "w", Tier.HBM) == []
        record = await index.record("w")
        assert record is not None
        source.incarnation, source.seq = record.incarnation, record.seq
        await apply_messages(index, source.store(SCOPE, blocks(0, 5)))
        assert await pinned(index, "w", Tier.HBM) == []
    await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
    source.held.clear()
    await apply_messages(index, source.begin(source.incarnation + 1), source.store(SCOPE, blocks(0, 5)))
    assert await pinned(index, "w", Tier.HBM) == []


async def test_who_gets_the_number_of_a_swept_holder_has_nothing_pinned(index: ResidencyIndex) -> None:
    shard = shard_of(partition_of("w", index.partitions), index.shards)
    names = (f"v{number}" for number in range(1_000))
    name = next(one for one in names if shard_of(partition_of(one, index.partitions), index.shards) == shard)
    await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
    record = await index.record("w")
    assert record is not None
    await index.retire("w", record.incarnation)
    assert await index.sweep(shard, 1_000) == 0
    if isinstance(index, MemoryIndex):
        index.shard_at(shard).table.last_number = MAX_HOLDER
    elif isinstance(index, RedisIndex):
        index._reuse_ms = 0
        keys = ShardKeys(shard)
        assert await index._store.client.exists(keys.pinned, keys.pinned_by(b"\0\0\1")) == 0
    source = MessageSource(name)
    await apply_messages(index, source.begin(1), source.store(SCOPE, blocks(0, 5)))
    assert [one.worker_id for one in await index.locate(SCOPE, HASHES[0])] == [name]
    assert await pinned(index, name, Tier.HBM) == []


async def test_an_index_that_is_deleted_keeps_no_pins(index: ResidencyIndex) -> None:
    if not isinstance(index, RedisIndex):
        return
    await index.put(USE, "w", Tier.HBM, blocks(0, 5), pinned=True)
    await index.unlink()
    for shard in range(index.shards):
        assert [key async for key in index._store.client.scan_iter(match=ShardKeys(shard).pattern)] == []
