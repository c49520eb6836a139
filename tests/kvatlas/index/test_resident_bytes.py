"""Resident bytes, by scope, model and tier, of each kind of index."""

import pytest

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.residency import ModelBlocks, TierBlocks
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import RawMessage, to_raw
from kvatlas.events import Message, ScopeUse, SnapshotBegin, SnapshotChunk, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(4 * 300), 4)


def head(blocks: int) -> bytes:
    return CHAIN[: blocks * HASH_BYTES]


def sized(
    source: MessageSource, event: Stored | SnapshotChunk, scope: Scope, block_bytes: int, *in_tiers: tuple[Tier, int]
) -> RawMessage:
    """A message whose scope has blocks of this size, and of others in these tiers."""
    source.seq += 1
    uses = {scope.scope_id: ScopeUse(scope, 4, block_bytes, in_tiers)}
    return to_raw(Message(source.worker_id, source.incarnation, source.seq, [event], uses, 1))


async def test_resident_bytes_are_those_of_each_scopes_blocks(index: ResidencyIndex) -> None:
    adapter = Scope("model", "tokenizer", "adapter")
    a, b = MessageSource("a"), MessageSource("b")
    await apply_messages(
        index,
        a.begin(1),
        sized(a, Stored(SCOPE.scope_id, Tier.HBM, head(2)), SCOPE, 100),
        sized(a, Stored(adapter.scope_id, Tier.HBM, head(3)), adapter, 1_000),
        sized(a, Stored(adapter.scope_id, Tier.CPU_DRAM, head(1)), adapter, 1_000),
    )
    await apply_messages(index, b.begin(1), sized(b, Stored(SCOPE.scope_id, Tier.HBM, head(5)), SCOPE, 200))
    rows = [(row.scope, row.tier, row.blocks, row.bytes) for row in await index.resident_blocks()]
    assert rows == [
        (SCOPE, Tier.HBM, 7, 2 * 100 + 5 * 200),
        (adapter, Tier.HBM, 3, 3_000),
        (adapter, Tier.CPU_DRAM, 1, 1_000),
    ]
    assert (await index.metrics()).resident_bytes == 5_200
    unused = Scope("model", "tokenizer", "unused")
    await apply_messages(index, a.remove(adapter, head(3)), a.remove(unused, head(3)))
    assert (await index.metrics()).resident_bytes == 2_200
    await index.retire("b", 1)
    for shard in range(index.shards):
        await index.sweep(shard, 1_000_000)
    rows = [(row.scope, row.tier, row.blocks, row.bytes) for row in await index.resident_blocks()]
    assert rows == [(SCOPE, Tier.HBM, 2, 200), (adapter, Tier.CPU_DRAM, 1, 1_000)]


async def test_the_size_is_told_by_model_and_tier(index: ResidencyIndex) -> None:
    other, adapter = Scope("other", "tokenizer"), Scope("model", "tokenizer", "adapter")
    a, b = MessageSource("a"), MessageSource("b")
    await apply_messages(
        index,
        a.begin(1),
        sized(a, Stored(SCOPE.scope_id, Tier.HBM, head(2)), SCOPE, 100),
        sized(a, Stored(adapter.scope_id, Tier.CPU_DRAM, head(3)), adapter, 100),
    )
    await apply_messages(
        index,
        b.begin(1),
        sized(b, Stored(SCOPE.scope_id, Tier.HBM, head(5)), SCOPE, 100),
        sized(b, Stored(other.scope_id, Tier.HBM, head(4)), other, 100),
    )
    assert (await index.metrics()).models == {
        SCOPE.model_id: ModelBlocks(TierBlocks(hbm=7, cpu_dram=3), TierBlocks(hbm=700, cpu_dram=300)),
        "other": ModelBlocks(TierBlocks(hbm=4), TierBlocks(hbm=400)),
    }


async def test_a_changed_block_size_counts_from_then_on_and_an_unknown_one_changes_nothing(
    index: ResidencyIndex,
) -> None:
    source = MessageSource("w")
    begin = source.begin(1)
    unknown, known, unknown_again = (
        sized(source, Stored(SCOPE.scope_id, Tier.HBM, CHAIN[8 * i : 8 * (i + 1)]), SCOPE, size)
        for i, size in enumerate((0, 300, 0))
    )
    await apply_messages(index, begin, unknown)
    assert (await index.metrics()).resident_bytes == 0
    await apply_messages(index, known, unknown_again)
    assert (await index.metrics()).resident_bytes == 900
    assert [r.bytes for r in await index.locate(SCOPE, unpack_hashes(CHAIN)[0])] == [300]


async def test_each_tier_has_its_own_size_in_sums_and_in_every_answer(index: ResidencyIndex) -> None:
    other, plain = Scope("model", "tokenizer", "other"), Scope("model", "tokenizer", "plain")
    source = MessageSource("w")
    tiers = [(Tier.CPU_DRAM, 25), (Tier.OBJECT_STORE, 400)]
    stored = {tier: Stored(SCOPE.scope_id, tier, head(3)) for tier in (Tier.HBM, Tier.CPU_DRAM, Tier.LOCAL_SSD)}
    await apply_messages(
        index,
        source.begin(1),
        sized(source, Stored(plain.scope_id, Tier.CPU_DRAM, head(2)), plain, 100),
        *(sized(source, event, SCOPE, 100, *tiers) for event in stored.values()),
        sized(source, Stored(other.scope_id, Tier.CPU_DRAM, head(1)), other, 100, (Tier.CPU_DRAM, 7)),
    )
    expected = {
        (SCOPE, Tier.HBM): (3, 300),
        (SCOPE, Tier.CPU_DRAM): (3, 75),
        (SCOPE, Tier.LOCAL_SSD): (3, 300),
        (other, Tier.CPU_DRAM): (1, 7),
        (plain, Tier.CPU_DRAM): (2, 200),
    }
    assert {(row.scope, row.tier): (row.blocks, row.bytes) for row in await index.resident_blocks()} == expected
    assert (await index.metrics()).resident_bytes == sum(size for _, size in expected.values())
    each = [(one.scope, one.tier, one.bytes) async for one in index.snapshot()]
    assert sorted(map(str, each)) == sorted(
        str((*place, size // blocks)) for place, (blocks, size) in expected.items() for _ in range(blocks)
    )
    located = await index.locate(SCOPE, unpack_hashes(CHAIN)[0])
    assert {one.tier: one.bytes for one in located} == {Tier.HBM: 100, Tier.CPU_DRAM: 25, Tier.LOCAL_SSD: 100}
    used = {(row.scope, row.tier): row.byte_seconds for row in await index.usage()}
    assert 0 < used[SCOPE, Tier.CPU_DRAM] < used[SCOPE, Tier.HBM] / 2


async def test_what_a_message_leaves_out_keeps_its_size(index: ResidencyIndex) -> None:
    async def sizes() -> dict[Tier, int]:
        return {one.tier: one.bytes for one in await index.locate(SCOPE, unpack_hashes(CHAIN)[0])}

    source, cpu = MessageSource("w"), Tier.CPU_DRAM
    hbm = Stored(SCOPE.scope_id, Tier.HBM, head(1))
    await apply_messages(
        index,
        source.begin(1),
        sized(source, hbm, SCOPE, 0),
        sized(source, Stored(SCOPE.scope_id, cpu, head(1)), SCOPE, 0, (cpu, 25)),
    )
    assert await sizes() == {Tier.HBM: 0, cpu: 25}
    await apply_messages(index, sized(source, hbm, SCOPE, 100))
    assert await sizes() == {Tier.HBM: 100, cpu: 25}
    await apply_messages(
        index, sized(source, hbm, SCOPE, 200, (Tier.LOCAL_SSD, 7)), sized(source, hbm, SCOPE, 0, (cpu, 30))
    )
    assert await sizes() == {Tier.HBM: 200, cpu: 30}
    await apply_messages(index, source.begin(2), sized(source, hbm, SCOPE, 0))
    assert await sizes() == {Tier.HBM: 0}, "a new incarnation knows nothing of the last one's sizes"


async def test_incarnations_in_one_call_know_nothing_of_each_others_sizes(index: ResidencyIndex) -> None:
    cpu = Tier.CPU_DRAM
    old, new, lost = (MessageSource("w", incarnation) for incarnation in (1, 2, 3))
    event, chunk = Stored(SCOPE.scope_id, cpu, head(1)), SnapshotChunk(SCOPE.scope_id, cpu, head(1))
    digest = Digest()
    digest.add(SCOPE.scope_id, cpu, head(1))
    await apply_messages(
        index,
        old.begin(1),
        sized(old, event, SCOPE, 100, (cpu, 25)),
        new.message(SnapshotBegin()),
        sized(new, chunk, SCOPE, 100),
        sized(old, event, SCOPE, 0, (cpu, 30)),  # a zombie's
        sized(lost, event, SCOPE, 0, (cpu, 35)),  # without its snapshot
        new.message(SnapshotEnd(1, digest.words)),
    )
    assert [one.bytes for one in await index.locate(SCOPE, unpack_hashes(CHAIN)[0])] == [100]


async def test_a_block_put_in_another_tier_has_its_own_size_and_changes_no_other(index: ResidencyIndex) -> None:
    await index.put(ScopeUse(SCOPE, 4, 100), "w", Tier.HBM, head(1))
    await index.put(ScopeUse(SCOPE, 4, 25), "w", Tier.CPU_DRAM, head(1))
    located = await index.locate(SCOPE, unpack_hashes(CHAIN)[0])
    assert {one.tier: one.bytes for one in located} == {Tier.HBM: 100, Tier.CPU_DRAM: 25}
