"""Resident bytes, by scope, model and tier, of each kind of index."""

import pytest

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.residency import ModelBlocks, TierBlocks
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import RawMessage, to_raw
from kvatlas.events import Message, ScopeUse, Stored
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(4 * 300), 4)


def head(blocks: int) -> bytes:
    return CHAIN[: blocks * HASH_BYTES]


def sized(source: MessageSource, event: Stored, scope: Scope, block_bytes: int) -> RawMessage:
    """A message whose scope has blocks of this size."""
    source.seq += 1
    uses = {scope.scope_id: ScopeUse(scope, 4, block_bytes)}
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
