"""Blocks of a chain share a record as long as they have everything in common."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Removed
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.block import packed_hashes, reversed_hashes
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.ledger.lineage import LONG_STRETCH

SETTINGS = LedgerSettings("m", "t", block_size=2)
TOKENS = list(range(2 * LONG_STRETCH))
CHAIN = extend_chain(TOKENS, 2)


def stored(first: int, last: int) -> EngineStored:
    """Blocks `first` to `last` - 1 of one chain; block i has the name i + 1."""
    return EngineStored(list(range(first + 1, last + 1)), first or None, TOKENS[2 * first : 2 * last], 2)


def fold(ledger: Ledger, *events: EngineEvent) -> None:
    ledger.fold(EngineBatch(events))


def stretches(ledger: Ledger) -> Sequence[Sequence[EngineHash]]:
    """The names of each plain stretch, by index."""
    for stretch in ledger.lineage.plain():
        assert all(ledger.lineage.known[name] is stretch for name in stretch.names)
        assert len(stretch.names) == len(stretch)
    return [one.names for one in sorted(ledger.lineage.plain(), key=lambda one: (one.index, one.names))]


def names(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first + 1, last + 1))


def test_the_blocks_of_an_event_are_one_stretch_and_no_count_is_kept_of_them() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 8))
    for one in (ledger, Ledger.load(ledger.dump(), SETTINGS)):
        assert stretches(one) == [names(0, 8)]
        assert not one.lineage.counts and set(one.resident()) == {(Tier.HBM, 0, name) for name in names(0, 8)}
        assert one.digest == ledger.digest


def test_blocks_stored_one_by_one_become_a_stretch_up_to_its_full_length() -> None:
    ledger = Ledger(SETTINGS)
    for at in range(LONG_STRETCH):
        fold(ledger, stored(at, at + 1))
    assert stretches(ledger) == [names(0, LONG_STRETCH - 1), names(LONG_STRETCH - 1, LONG_STRETCH)]
    fold(ledger, EngineStored([LONG_STRETCH + 1], LONG_STRETCH, [1, 2], 2))
    assert stretches(ledger)[0] == names(0, LONG_STRETCH)
    assert packed_hashes(ledger.lineage.plain())[: len(CHAIN)] == CHAIN
    assert ledger.announced_blocks == LONG_STRETCH + 1 and ledger.counters.restored == 0


def test_a_branch_cuts_a_stretch_where_it_leaves() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 8), EngineStored([91, 92], 5, [7, 7, 7, 7], 2))
    assert stretches(ledger) == [names(0, 5), names(5, 8), (91, 92)]
    assert ledger.announced_blocks == 10


@pytest.mark.parametrize("at_once", [True, False])
def test_removals_cut_out_what_is_gone_and_a_store_brings_it_back_with_what_is_new(at_once: bool) -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 8))
    removals = [EngineRemoved([name]) for name in (8, 7, 6, 5)]
    for events in [removals] if at_once else [[removal] for removal in removals]:
        fold(ledger, *events)
    assert stretches(ledger)[0] == names(0, 4) and ledger.announced_blocks == 4
    assert list(ledger.lineage.evicted) == [8, 7, 6, 5]
    fold(ledger, stored(4, 10))
    assert not ledger.lineage.evicted and ledger.digest.blocks == 10 and not ledger.lineage.counts
    assert all(stretch.copies == 1 for stretch in ledger.lineage.plain())


def test_a_hole_hides_what_is_behind_it_until_it_is_filled() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 8))
    (gone,) = ledger.fold(EngineBatch([EngineRemoved([4, 3, 99, 3])]))
    assert isinstance(gone, Removed) and gone.hashes == reversed_hashes(CHAIN[16:64])
    assert (ledger.orphans, ledger.counters.withdrawn, ledger.counters.removed_unknown) == (4, 4, 2)
    fold(ledger, stored(2, 4))
    assert (ledger.orphans, ledger.counters.restored, ledger.announced_blocks) == (0, 4, 8)


def test_a_second_copy_takes_only_its_block_out_of_the_stretch() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 8), stored(3, 4))
    assert stretches(ledger) == [names(0, 3), names(4, 8)] and ledger.lineage.counts == {4: 2}
    fold(ledger, EngineRemoved([4]))
    assert ledger.announced_blocks == 8
    fold(ledger, EngineRemoved([4]))
    assert ledger.announced_blocks == 3


def test_a_copy_in_another_tier_takes_its_block_out_of_the_stretch() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, stored(0, 4), EngineStored([2], None, [], 0, Tier.CPU_DRAM))
    assert stretches(ledger) == [names(0, 1), names(2, 4)]
    fold(ledger, EngineRemoved([2]))
    assert ledger.announced_blocks == 4


def test_a_second_group_of_full_attention_ends_all_stretches() -> None:
    ledger = Ledger(SETTINGS)
    fold(ledger, replace(stored(0, 4), kind=AttentionKind.FULL))
    assert stretches(ledger) == [names(0, 4)]
    fold(ledger, replace(stored(0, 2), kind=AttentionKind.FULL, group=1))
    assert not stretches(ledger) and ledger.lineage.counts == dict.fromkeys(names(0, 4), 1)
    assert ledger.announced_blocks == 2


def test_a_forgotten_tail_is_made_again_with_the_same_hashes() -> None:
    ledger = Ledger(SETTINGS, remembered_evictions=0)
    fold(ledger, stored(0, 8))
    fold(ledger, EngineRemoved([8, 7, 6]))
    assert sorted(ledger.lineage.known) == [1, 2, 3, 4, 5]
    fold(ledger, stored(5, 8))
    assert packed_hashes(ledger.lineage.plain()) == CHAIN[:64]
    assert ledger.digest.blocks == 8


def test_all_behind_a_forgotten_block_is_forgotten_however_long_the_chain_is() -> None:
    ledger = Ledger(SETTINGS, remembered_evictions=0)
    last = 3000
    fold(ledger, EngineStored(list(range(1, last)), None, list(range(2, 2 * last)), 2))
    fold(ledger, EngineRemoved([1]))
    assert not ledger.lineage.known and not ledger.announced_blocks
    assert len(set(ledger.resident())) == last - 2


def test_reversed_hashes_are_those_of_the_blocks_from_the_last_one_on() -> None:
    assert reversed_hashes(CHAIN[:24]) == CHAIN[16:24] + CHAIN[8:16] + CHAIN[:8]
