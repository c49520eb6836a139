"""Engines that may report copies again, and those whose events don't say what they hold."""

from dataclasses import replace
from random import Random

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.one_chain import fold, held, ledger, store


def report(names: list[int]) -> EngineStored:
    """What a request with `kv_cache_report_mode: "full"` finds in the cache; a new copy of a whole prefix looks the same."""
    return replace(store(names), maybe_again=True)


def test_a_full_report_adds_no_copy() -> None:
    one = ledger()
    fold(one, report([1, 2, 3]), report([1, 2, 3]), report([1, 2]))
    fold(one, EngineRemoved([3]))
    assert one.announced_blocks == 2
    fold(one, EngineRemoved([2, 1]))
    assert one.announced_blocks == 0


def test_a_block_of_which_a_copy_was_left_counts_again_once_one_behind_it_is_stored() -> None:
    one = ledger()
    fold(one, report([1, 2]), report([1, 2]), EngineRemoved([2, 1]))
    assert one.announced_blocks == 0
    fold(one, store([3], 2, 2))
    assert one.announced_blocks == 3


def test_doubts_are_saved() -> None:
    one = ledger()
    fold(one, report([1, 2]), report([1, 2]), EngineRemoved([2, 1]))
    again = Ledger.load(one.dump(), one.settings)
    fold(again, store([3], 2, 2))
    assert again.announced_blocks == 3


@pytest.mark.parametrize("seed", range(20))
def test_whatever_mixture_of_reports_comes_nothing_is_claimed_that_is_gone(seed: int) -> None:
    """An engine that caches prefixes of one chain, in copies; it reports hits at random."""
    chance, one = Random(seed), ledger()
    copies = [0] * 6
    for _ in range(300):
        events: list[EngineEvent] = []
        cached = next((at for at, count in enumerate(copies) if not count), len(copies))
        if chance.random() < 0.5:
            length = chance.randint(1, len(copies))
            hit = 0 if chance.random() < 0.3 else min(cached, length - 1)
            if hit and chance.random() < 0.5:
                events.append(report(list(range(1, hit + 1))))
            names = list(range(hit + 1, length + 1))
            events.append(replace(store(names, hit or None, hit), maybe_again=not hit))
            for at in range(hit, length):
                copies[at] += 1
        elif chance.random() < 0.1:
            copies = [0] * len(copies)
            events.append(EngineCleared())
        elif last := max((at + 1 for at, count in enumerate(copies) if count), default=0):
            copies[last - 1] -= 1
            events.append(EngineRemoved([last]))
        fold(one, *events)
        assert {name for _, _, name in one.resident()} <= {at + 1 for at, count in enumerate(copies) if count}


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
