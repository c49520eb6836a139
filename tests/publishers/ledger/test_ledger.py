"""The ledger's rules, one by one. For the meaning of its hashes, see `test_resolver.py`."""

import gc
from typing import Any

import pytest

from kvatlas.blocks.hashing import extend_chain, pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.events import Cleared, Removed, Stored
from kvatlas_publishers.engine_events import EngineCleared, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import LEAST_REMEMBERED, Ledger, LedgerSettings
from tests.publishers.ledger.one_chain import SCOPE_ID, fold, hashes, held, ledger, reverse, store


def test_a_chain_is_stored_in_one_event_and_removed_in_another_child_first() -> None:
    one = ledger()
    assert fold(one, store([1, 2, 3])) == [Stored(SCOPE_ID, Tier.HBM, hashes(0, 3), None, 0)]
    assert fold(one, store([4, 5], 3, 3)) == [Stored(SCOPE_ID, Tier.HBM, hashes(3, 5), hashes(2, 3), 3)]
    gone = fold(one, EngineRemoved([4]), EngineRemoved([5]), EngineRemoved([3]))
    assert gone == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(2, 5)))]


def test_only_the_first_copy_and_the_last_are_published() -> None:
    one = ledger()
    fold(one, store([1]))
    assert fold(one, store([1])) == []
    assert fold(one, EngineRemoved([1])) == []
    assert fold(one, EngineRemoved([1])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_a_block_stored_and_removed_within_a_batch_is_not_published() -> None:
    one = ledger()
    assert fold(one, store([1, 2]), EngineRemoved([2, 1])) == []
    fold(one, store([1, 2]))
    assert fold(one, EngineRemoved([2, 1]), store([1, 2])) == []


def test_set_semantics_count_one_copy_however_often_it_is_announced() -> None:
    one = ledger(set_semantics=True)
    fold(one, store([1]), store([1]))
    assert fold(one, EngineRemoved([1])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_descendants_of_a_removed_block_are_withdrawn_and_restored_with_it() -> None:
    one = ledger()
    fold(one, store([1, 2, 3, 4]))
    assert fold(one, EngineRemoved([2])) == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(1, 4)))]
    assert (one.counters.withdrawn, one.orphans) == (2, 2)
    assert fold(one, store([2], 1, 1)) == [Stored(SCOPE_ID, Tier.HBM, hashes(1, 4), hashes(0, 1), 1)]
    assert (one.counters.restored, one.orphans) == (2, 0)


def test_a_tier_is_added_before_another_is_lost() -> None:
    one = ledger()
    fold(one, store([1, 2]))
    events = fold(one, EngineRemoved([2, 1]), store([1, 2], tier=Tier.CPU_DRAM))
    assert events == [
        Stored(SCOPE_ID, Tier.CPU_DRAM, hashes(0, 2), None, 0),
        Removed(SCOPE_ID, Tier.HBM, reverse(hashes(0, 2))),
    ]


def test_an_ancestor_in_another_tier_is_enough() -> None:
    one = ledger()
    fold(one, store([1], tier=Tier.CPU_DRAM), store([2], 1, 1))
    assert held(one) == {("cpu_dram", 1), ("hbm", 2)}


def test_removals_go_child_first_across_tiers() -> None:
    one = ledger()
    fold(one, store([1]), store([2], 1, 1, tier=Tier.CPU_DRAM), store([3], 2, 2))
    events = fold(one, EngineRemoved([1, 3]), EngineRemoved([2], Tier.CPU_DRAM))
    assert [(event.tier, event.hashes) for event in events] == [
        (Tier.HBM, hashes(2, 3)),
        (Tier.CPU_DRAM, hashes(1, 2)),
        (Tier.HBM, hashes(0, 1)),
    ]


def test_cleared_comes_first_if_nothing_announced_remains() -> None:
    one = ledger()
    fold(one, store([1, 2, 3]))
    events = fold(one, EngineCleared(), store([1]))
    assert events == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(1, 3)))]  # the first block came back: a net change
    assert fold(one, EngineCleared()) == [Cleared()]
    assert one.announced_blocks == 0 and one.digest.blocks == 0
    assert fold(one, EngineCleared()) == []
    fold(one, store([1, 2]))
    other = store([9], token_ids=[7, 7])
    assert fold(one, EngineCleared(), other) == [
        Cleared(),
        Stored(SCOPE_ID, Tier.HBM, extend_chain([7, 7], 2), None, 0),
    ]


def test_a_clear_of_the_device_leaves_the_host_tier() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([1], tier=Tier.CPU_DRAM))
    assert fold(one, EngineCleared((Tier.HBM,))) == [
        Removed(SCOPE_ID, Tier.HBM, hashes(0, 1)),
        Removed(SCOPE_ID, Tier.HBM, hashes(1, 2)),
    ]
    assert held(one) == {("cpu_dram", 1)}


def test_granularity_announces_every_gth_block_with_the_announced_block_before() -> None:
    one = ledger(granularity=2)
    assert fold(one, store([1, 2, 3, 4, 5])) == [Stored(SCOPE_ID, Tier.HBM, hashes(1, 2) + hashes(3, 4), None, 1)]
    assert fold(one, store([6], 5, 5)) == [Stored(SCOPE_ID, Tier.HBM, hashes(5, 6), hashes(3, 4), 5)]
    assert fold(one, EngineRemoved([5])) == [Removed(SCOPE_ID, Tier.HBM, hashes(5, 6))]  # withdrawn after it


def test_removals_of_unknown_hashes_change_nothing() -> None:
    one = ledger()
    assert fold(one, EngineRemoved([1, 2]), EngineRemoved([3], Tier.LOCAL_SSD)) == []
    assert one.counters.removed_unknown == 3


def test_empty_forgets_everything_without_an_event() -> None:
    one = ledger()
    fold(one, store([1, 2]))
    one.empty()
    assert not set(one.resident()) and one.snapshot() == [] and one.digest.blocks == 0 and one.uses == {}
    assert fold(one, store([1])) == [Stored(SCOPE_ID, Tier.HBM, hashes(0, 1), None, 0)]


def test_a_snapshot_chunk_has_at_most_32_kib_of_hashes() -> None:
    one = ledger(block_size=1)
    tokens = list(range(10_000))
    fold(one, store(tokens, token_ids=tokens, block_size=1))
    chunks = one.snapshot()
    assert [len(chunk.hashes) // 8 for chunk in chunks] == [4096, 4096, 1808]
    assert [chunk.first_index for chunk in chunks] == [0, 4096, 8192]
    assert chunks[1].parent == chunks[0].hashes[-8:]
    assert b"".join(chunk.hashes for chunk in chunks) == extend_chain(tokens, 1)


def test_memory_of_evictions_is_bounded_and_counted() -> None:
    one = Ledger(LedgerSettings("m", "t", block_size=2), remembered_evictions=3)
    for i in range(10):
        fold(one, store([i], token_ids=[i, i]), EngineRemoved([i]))
    assert len(one.lineage.known) == 3
    assert fold(one, store([50], 0, 1)) == [] and one.counters.unknown_parent == 1


def test_what_was_forgotten_is_no_garbage_that_has_to_be_looked_for() -> None:
    one = ledger(block_size=1)
    fold(one, store(list(range(200)), token_ids=list(range(200)), block_size=1))
    for name in range(200, 300):  # branches
        fold(one, store([name], name - 180, token_ids=[name], block_size=1))
    gc.collect()
    gc.disable()
    try:
        one.empty()
        forgotten = gc.collect()
    finally:
        gc.enable()
    assert forgotten < 100
    assert not one.lineage.known


def test_no_more_evictions_are_remembered_than_blocks_were_held() -> None:
    one = ledger(block_size=1)
    many = list(range(2 * LEAST_REMEMBERED))
    fold(one, store(many, token_ids=many, block_size=1))
    fold(one, EngineRemoved(list(reversed(many))))
    for name in range(5 * LEAST_REMEMBERED, 10 * LEAST_REMEMBERED):
        fold(one, store([name], token_ids=[name], block_size=1), EngineRemoved([name]))
    assert len(one.lineage.known) == len(many)


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "x"},
        {"tokenizer_id": "x"},
        {"tenant_id": "x"},
        {"block_size": 4},
        {"salt_is_tenant": True},
        {"set_semantics": True},
    ],
)
def test_a_ledger_saved_under_other_settings_is_refused(other: dict[str, Any]) -> None:
    dumped = ledger().dump()
    with pytest.raises(InvalidValue, match="saved for"):
        Ledger.load(dumped, LedgerSettings(**({"model_id": "m", "tokenizer_id": "t"} | other)))


def test_bytes_that_are_no_ledger_are_refused() -> None:
    one = ledger()
    fold(one, store([1, 2, 3]), store([1], salt="s"))
    dumped = one.dump()
    for torn in (b"", b"\xc1", dumped[:-3], b"\x93\x07\x01\x02", b"\x80"):
        with pytest.raises(InvalidValue):
            Ledger.load(torn, one.settings)


@pytest.mark.parametrize(
    "wrong", [{"model_id": ""}, {"block_size": 0}, {"granularity": 0}, {"block_bytes": -1}, {"tenant_id": "x" * 600}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        LedgerSettings(**({"model_id": "m", "tokenizer_id": "t"} | wrong))


def test_hashes_match_the_published_check_vector() -> None:
    one = ledger()
    (event,) = fold(one, store(["a"], token_ids=list(range(1, 17)), block_size=16))
    assert event.hashes == pack_hashes([16863443419780771464])


def test_scopes_of_former_tenants_are_forgotten() -> None:
    one = Ledger(LedgerSettings("m", "t", salt_is_tenant=True), remembered_evictions=2)
    for tenant in range(100):
        names = [10 * tenant + 1, 10 * tenant + 2]
        events = [*fold(one, store(names, salt=f"tenant-{tenant}")), *fold(one, EngineRemoved(list(reversed(names))))]
        assert all(event.scope_id in one.uses for event in events)
        fold(one, EngineStored([-tenant], None, [1 << 40] * 2, 2, salt=f"unindexable-{tenant}"))
    assert len(one.uses) <= 4
    assert len(one.lineage.namespaces) <= 2


def test_a_size_that_the_engine_says_later_is_told_with_the_next_blocks_unless_it_was_set() -> None:
    for settings, expected in (
        (LedgerSettings("m", "m", block_size=4), 300),
        (LedgerSettings("m", "m", token_bytes=5), 20),
    ):
        ledger = Ledger(settings)
        fold(ledger, EngineStored([1], None, [1, 2, 3, 4], 4))
        ledger.set_told_block_bytes(300)
        fold(ledger, EngineStored([2], 1, [5, 6, 7, 8], 4))
        assert [use.block_bytes for use in ledger.uses.values()] == [expected]
        assert ledger.sizes.block_bytes == expected
