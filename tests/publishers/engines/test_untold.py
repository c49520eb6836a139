"""Engines whose events don't report everything that they hold."""

from dataclasses import replace

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineCleared, EngineRemoved
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.one_chain import fold, held, ledger, store


def test_a_clear_takes_the_tiers_of_the_engines_process_and_leaves_disks_and_stores() -> None:
    one = ledger()
    for tier in Tier:
        fold(one, replace(store([1]), tier=tier))
    fold(one, EngineCleared())
    assert {tier for tier, _, _ in one.resident()} == {Tier.REMOTE_HBM, Tier.LOCAL_SSD, Tier.OBJECT_STORE}


def test_blocks_that_can_not_be_located_are_left_out_and_counted() -> None:
    one = ledger()
    assert fold(one, replace(store([1, 2]), located=False)) == []
    assert one.counters.engine_too_old == 2 and not held(one)


def test_a_block_behind_one_whose_removal_was_announced_is_counted() -> None:
    one = ledger()
    fold(one, store([1, 2]), EngineRemoved([2, 1]), replace(store([3], 2, 2), removes_held=True))
    assert one.counters.parent_removed == 1


def test_keys_that_events_do_not_show_make_all_an_upper_bound_also_after_a_load() -> None:
    one = ledger()
    fold(one, replace(store([1]), untold_keys="no keys"))
    assert one.reuse.upper_bound == "no keys"
    assert Ledger.load(one.dump(), one.settings).reuse.upper_bound == "no keys"


def test_chunks_are_left_out_until_the_removal_of_one_was_told() -> None:
    one = Ledger(LedgerSettings("m", "t"))
    fold(one, store([1]))
    chunk = replace(
        store([7]), token_ids=store([1, 2]).token_ids, block_size=2 * store([1]).block_size, tier=Tier.CPU_DRAM
    )
    chunk = replace(chunk, offloaded=True, chunk_removal_told=False)
    fold(one, chunk)
    assert one.counters.removal_untold == 2 and not any(tier is Tier.CPU_DRAM for tier, _, _ in one.resident())
    fold(one, EngineRemoved([7], Tier.CPU_DRAM), chunk)
    assert sum(tier is Tier.CPU_DRAM for tier, _, _ in one.resident()) == 2
