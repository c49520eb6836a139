"""Windows whose blocks are smaller than full attention's: three small ones per block of six tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineCleared, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.ledger.marks.small_blocks import SmallBlocks
from tests.publishers.ledger.one_chain import fold, ledger

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW
TOKENS = list(range(100, 136))  # six blocks of six


def full(names: Sequence[Any], parent: Any = None, first: int = 0, tokens: Sequence[int] = TOKENS) -> EngineStored:
    """Blocks of full attention, from number `first` on."""
    return EngineStored(list(names), parent, tokens[6 * first : 6 * (first + len(names))], 6, kind=FULL)


def window(names: Sequence[Any], parent: Any = None, first: int = 0, blocks: int = 1) -> EngineStored:
    """The small blocks of `blocks` large ones, some of them left out."""
    tokens = TOKENS[6 * first : 6 * (first + blocks)]
    return EngineStored(list(names), parent, tokens, 2, group=1, kind=WINDOW, window_tokens=7)  # needs three small ones


def marked(one: Ledger) -> set[int]:
    """The marked positions, in large blocks."""
    blocks = {
        block.sequence_hash: block.index + 1
        for namespace in one.lineage.namespaces.values()
        for block in namespace.stretches()
    }
    return {blocks[hash.to_bytes(8, "little")] for _, hash in one.marked()}


@pytest.mark.parametrize("window_first", [True, False])
def test_a_position_needs_the_small_blocks_of_a_window_before_it(window_first: bool) -> None:
    one = ledger()
    batch = [full([b"A", b"B", b"C"]), window([b"a1", b"a2", b"A", b"b2", b"B", b"c1", b"c2", b"C"], blocks=3)]
    fold(one, *(reversed(batch) if window_first else batch))
    assert one.block_size == 6 and not one.reuse.upper_bound
    assert marked(one) == {1, 3}, "of B the first third is missing"
    fold(one, window([b"b1", b"b2", b"B"], b"A", 1))
    assert marked(one) == {1, 2, 3}
    fold(one, EngineRemoved([b"b2"], group=1))
    assert marked(one) == {1, 2, 3}, "there is another copy"
    fold(one, EngineRemoved([b"b2"], group=1))
    assert marked(one) == {1, 3}


def test_prompts_that_fork_inside_a_block_share_its_small_blocks() -> None:
    one = ledger()
    fork = [*TOKENS[:4], 7, 8]
    fold(one, full([b"A"]), window([b"a1", b"a2", b"A"]))
    fold(one, full([b"X"], tokens=fork), window([b"a1", b"a2", b"X"]))
    assert one.marked_blocks == 2
    fold(one, EngineRemoved([b"A", b"a1", b"a2"], group=1), EngineRemoved([b"A"]))
    assert one.marked_blocks == 1, "X has its own copies"
    fold(one, EngineRemoved([b"a1"], group=1))
    assert one.marked_blocks == 0


def test_a_clear_takes_the_small_blocks_too() -> None:
    one = ledger()
    fold(one, full([b"A"]), window([b"a1", b"a2", b"A"]))
    fold(one, EngineCleared())
    assert one.marked_blocks == 0
    fold(one, full([b"A"]), window([b"a2", b"A"]))
    assert one.marked_blocks == 0, "a1 is gone"
    fold(one, window([b"a1", b"a2", b"A"]))
    assert one.marked_blocks == 1


def test_what_a_connector_stores_ties_nothing_and_counts_for_what_is_tied() -> None:
    one = ledger()
    fold(one, full([b"A", b"B"]), window([b"a1", b"a2", b"A"]))
    copies = window([b"b1", b"b2", b"A", b"a2", b"a1", b"B"])
    fold(one, replace(copies, token_ids=(), block_size=0, tier=Tier.CPU_DRAM, kind=None, offloaded=True))
    assert marked(one) == {1}
    fold(one, EngineRemoved([b"a1", b"a2", b"A"], group=1))
    assert marked(one) == set(), "the window's blocks are in the CPU tier, those of full attention are not"
    fold(one, replace(full([b"A"]), tier=Tier.CPU_DRAM, offloaded=True))
    assert marked(one) == {1}
    fold(one, EngineRemoved([b"a1"], Tier.CPU_DRAM, 1))
    assert marked(one) == set()


def test_a_saved_ledger_knows_the_small_blocks() -> None:
    one = ledger()
    fold(one, full([b"A", b"B"]), window([b"a1", b"a2", b"A", b"b1", b"b2", b"B"], blocks=2))
    again = Ledger.load(one.dump(), one.settings)
    assert (again.reuse, again.digest_words, marked(again)) == (one.reuse, one.digest_words, {1, 2})
    fold(again, EngineRemoved([b"b1"], group=1))
    assert marked(again) == {1}
    with pytest.raises(InvalidValue, match="block part 7 is already taken, or not below 2"):
        Ledger.load(one.dump().replace(b"\xc4\x02a1\xc4\x01A\x00", b"\xc4\x02a1\xc4\x01A\x07"), one.settings)


def test_what_is_held_no_more_is_forgotten() -> None:
    small = SmallBlocks(2)
    small.stored([b"a", b"A", b"b", b"B"])
    assert list(small.tie({b"A", b"B"}.__contains__, {b"a"}.__contains__)) == [(b"a", b"A", 0)]
    assert list(small.tie({b"A", b"B"}.__contains__, {b"a"}.__contains__)) == []
    small.forget(b"a")
    small.forget(b"b")
    assert (small.tied, small.of(b"A")) == ({}, {})
