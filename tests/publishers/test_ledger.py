"""The ledger's rules, one by one."""

from typing import Any

import pytest

from kvatlas.errors import InvalidValue
from kvatlas.events import (
    Cleared,
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Removed,
    Stored,
)
from kvatlas.hashing import extend_chain, pack_hashes
from kvatlas.identity import Scope
from kvatlas.tiers import Tier
from publishers.ledger import Ledger, LedgerSettings
from publishers.unplaced import Unplaced

SCOPE_ID = Scope("m", "t").scope_id
TOKENS = list(range(100, 112))  # six blocks of two
CHAIN = extend_chain(TOKENS, 2)


def ledger(**settings: Any) -> Ledger:
    return Ledger(LedgerSettings("m", "t", **settings))


def store(names: list[Any], parent: Any = None, first: int = 0, **fields: Any) -> EngineStored:
    """Blocks of the one chain, from block `first` on."""
    tokens = fields.pop("token_ids", TOKENS[2 * first : 2 * (first + len(names))])
    return EngineStored(names, parent, tokens, fields.pop("block_size", 2), **fields)


def fold(one: Ledger, *events: EngineEvent) -> Any:
    return one.fold(EngineBatch(events))


def hashes(first: int, last: int) -> bytes:
    return CHAIN[8 * first : 8 * last]


def reverse(packed: bytes) -> bytes:
    return b"".join(packed[at : at + 8] for at in range(len(packed) - 8, -1, -8))


def hashes_of(event: Stored | Removed) -> list[bytes]:
    return [event.hashes[at : at + 8] for at in range(0, len(event.hashes), 8)]


def held(one: Ledger) -> set[tuple[str, Any]]:
    return {(tier.label, name) for _, tier, name, _ in one.announced()}


def test_a_chain_is_one_event_and_its_going_another_child_first() -> None:
    one = ledger()
    assert fold(one, store([1, 2, 3])) == [Stored(SCOPE_ID, Tier.HBM, hashes(0, 3), None, 0)]
    assert fold(one, store([4, 5], 3, 3)) == [Stored(SCOPE_ID, Tier.HBM, hashes(3, 5), hashes(2, 3), 3)]
    gone = fold(one, EngineRemoved([4]), EngineRemoved([5]), EngineRemoved([3]))
    assert gone == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(2, 5)))]


def test_only_the_first_copy_and_the_last_are_told() -> None:
    one = ledger()
    fold(one, store([1]))
    assert fold(one, store([1])) == []
    assert fold(one, EngineRemoved([1])) == []
    assert fold(one, EngineRemoved([1])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_what_comes_and_goes_within_a_batch_is_not_told() -> None:
    one = ledger()
    assert fold(one, store([1, 2]), EngineRemoved([2, 1])) == []
    fold(one, store([1, 2]))
    assert fold(one, EngineRemoved([2, 1]), store([1, 2])) == []


def test_set_semantics_take_one_copy_however_often_told() -> None:
    one = ledger(set_semantics=True)
    fold(one, store([1]), store([1]))
    assert fold(one, EngineRemoved([1])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_descendants_of_a_block_that_goes_are_withdrawn_and_come_back() -> None:
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


def test_cleared_is_told_when_nothing_announced_remains_and_is_first() -> None:
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
    assert fold(one, EngineCleared()) == [
        Removed(SCOPE_ID, Tier.HBM, hashes(0, 1)),
        Removed(SCOPE_ID, Tier.HBM, hashes(1, 2)),
    ]
    assert held(one) == {("cpu_dram", 1)}


def test_a_late_child_finds_its_evicted_parents_chain() -> None:
    one = ledger()
    fold(one, store([1, 2]))
    fold(one, EngineRemoved([2]))
    assert fold(one, store([3], 2, 2)) == []
    assert one.orphans == 1 and one.counters.unknown_parent == 0
    assert fold(one, store([2], 1, 1)) == [Stored(SCOPE_ID, Tier.HBM, hashes(1, 3), hashes(0, 1), 1)]


def test_a_block_of_an_unknown_parent_is_counted_and_announced_when_its_parent_is() -> None:
    one = ledger()
    assert fold(one, store([4], 3, 3), store([3], 2, 2)) == []
    assert one.counters.unknown_parent == 2
    assert {name for _, _, name in one.resident()} == {3, 4}
    one = Ledger.load(one.dump(), one.settings)
    assert fold(one, store([1, 2])) == [Stored(SCOPE_ID, Tier.HBM, hashes(0, 4), None, 0)]
    assert fold(one, EngineRemoved([3])) == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(2, 4)))]


def test_a_block_that_went_before_its_parent_was_known_is_not_announced_with_it() -> None:
    one = ledger()
    fold(one, store([3], 2, 2), store([3], 2, 2), EngineRemoved([3]), store([4], 3, 3))
    fold(one, store([1, 2]))
    assert held(one) == {("hbm", 1), ("hbm", 2), ("hbm", 3), ("hbm", 4)}
    assert fold(one, EngineRemoved([3])) == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(2, 4)))]
    two = ledger()
    fold(two, store([3], 2, 2), EngineRemoved([3]), store([1, 2]))
    assert held(two) == {("hbm", 1), ("hbm", 2)}


def test_what_waits_for_an_unknown_parent_is_kept_once_and_all_that_branches_off_it() -> None:
    kept = Unplaced()
    for event in [
        store([2, 3], 1, 1),
        store([2, 3, 4], 1, 1),
        store([2, 5], 1, 1),
        store([2], 1, 1),
        store([3, 4], 2, 2),
    ]:
        kept.keep(event)
    assert [(event.parent, event.hashes) for event in kept] == [(1, [2, 3]), (3, [4]), (2, [5])]
    one = ledger()
    fold(one, store([2, 3], 1, 1), store([2, 5], 1, 1), store([2, 3, 4], 1, 1), store([1]))
    assert held(one) == {("hbm", name) for name in (1, 2, 3, 4, 5)}
    kept.take(1)
    kept.keep(store([2], 1, 1))
    assert [event.hashes for event in kept] == [[4], [5], [2]]


def test_what_waits_for_unknown_parents_is_bounded_and_never_placed_in_another_scope() -> None:
    kept = Unplaced(most_tokens=6)
    for child in (11, 12, 13, 14):
        kept.keep(store([child], child - 10, 1))
    assert [event.hashes for event in kept] == [[12], [13], [14]]
    assert [event.hashes for event in kept.take(2)] == [[12]] and not kept.take(1)
    one = ledger()
    fold(one, store([2], 1, 1, adapter="lora"))
    fold(one, store([1]))
    assert held(one) == {("hbm", 1)}
    assert fold(one, store([1], adapter="lora")) != [] and one.announced_blocks == 3


def test_a_parent_in_another_adapters_scope_is_unknown() -> None:
    one = ledger()
    fold(one, store([1]))
    assert fold(one, store([2], 1, 1, adapter="lora")) == []
    assert one.counters.unknown_parent == 1


def test_the_adapter_is_in_the_scope_and_not_in_the_hash() -> None:
    one = ledger()
    (event,) = fold(one, store([1], adapter="lora"))
    assert event == Stored(Scope("m", "t", "lora").scope_id, Tier.HBM, hashes(0, 1), None, 0)
    assert one.uses[event.scope_id].scope.adapter_id == "lora"


def test_a_placeholder_is_a_copy_of_the_block_its_hash_is_known_for() -> None:
    one = ledger()
    fold(one, store([1], adapter="lora"), store([2]))
    placeholder = store([1, 9], token_ids=[], block_size=0, tier=Tier.CPU_DRAM)
    (event,) = fold(one, placeholder)
    assert (event.scope_id, event.tier) == (Scope("m", "t", "lora").scope_id, Tier.CPU_DRAM)
    assert one.counters.placeholder_unknown == 1
    assert (Tier.CPU_DRAM, 0, 9) in set(one.resident())


def test_a_placeholder_of_an_evicted_block_still_finds_it() -> None:
    one = ledger()
    fold(one, store([1]))
    fold(one, EngineRemoved([1]))
    fold(one, store([1], token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    assert held(one) == {("cpu_dram", 1)}


def test_an_unknown_placeholder_counts_once_the_hash_becomes_known() -> None:
    one = ledger()
    fold(one, store([1], token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    fold(one, store([1]))
    assert held(one) == {("hbm", 1), ("cpu_dram", 1)}


def test_token_ids_beyond_32_bits_make_that_event_unindexable_and_its_children_unknown() -> None:
    one = ledger(block_size=2)
    assert fold(one, store([1], token_ids=[1 << 32, 5]), store([2], 1, 1), store([3], token_ids=[5, 6])) != []
    assert (one.counters.unindexable, one.counters.unknown_parent) == (1, 1)
    assert held(one) == {("hbm", 3)}
    fold(one, EngineRemoved([1, 2]))
    assert {name for _, _, name in one.resident()} == {3}


def test_partial_blocks_are_referenced_and_not_indexed() -> None:
    one = ledger(block_size=2)
    assert fold(one, store([1], token_ids=[5], block_size=1)) == []
    assert one.counters.other_block_size == 1 and len(set(one.resident())) == 1


def test_tokens_that_are_not_a_full_block_each_are_legal_only_for_other_groups() -> None:
    one = ledger(block_size=2)
    assert fold(one, store([1, 2], token_ids=[5, 6])) == []
    assert one.counters.unindexable == 2
    fold(one, store([1, 2], token_ids=[5, 6], group=1, indexable=False))
    assert one.counters.unindexable == 2 and len(set(one.resident())) == 4


def test_the_block_size_is_learned_and_a_larger_one_corrects_a_partial_first_block() -> None:
    one = ledger()
    fold(one, store([9], token_ids=[5], block_size=1))
    assert one.block_size == 1 and one.announced_blocks == 1
    events = fold(one, store([1, 2]))
    assert events == [Cleared(), Stored(SCOPE_ID, Tier.HBM, hashes(0, 2), None, 0)]
    assert one.uses[SCOPE_ID].block_size == 2
    assert fold(one, store([8], token_ids=[6], block_size=1)) == []
    fold(one, EngineRemoved([9, 8, 2, 1]))
    assert not set(one.resident()) and not one.announced_blocks


def test_granularity_tells_every_gth_block_with_the_announced_block_before() -> None:
    one = ledger(granularity=2)
    assert fold(one, store([1, 2, 3, 4, 5])) == [Stored(SCOPE_ID, Tier.HBM, hashes(1, 2) + hashes(3, 4), None, 1)]
    assert fold(one, store([6], 5, 5)) == [Stored(SCOPE_ID, Tier.HBM, hashes(5, 6), hashes(3, 4), 5)]
    assert fold(one, EngineRemoved([5])) == [Removed(SCOPE_ID, Tier.HBM, hashes(5, 6))]  # withdrawn behind it


def test_the_salt_is_an_extra_key_of_the_first_block_only() -> None:
    one = ledger()
    (event,) = fold(one, store([1, 2], salt="acme"))
    assert event.hashes == extend_chain(TOKENS[:4], 2, None, [["acme"]])
    (more,) = fold(one, store([3], 2, 2))  # vLLM names the salt with the first block alone
    (again,) = fold(one, store([4], 3, 3, salt="acme"))  # SGLang with every event
    assert more.hashes + again.hashes == extend_chain(TOKENS[:8], 2, None, [["acme"]])[16:]


def test_the_salt_may_be_the_tenant_instead() -> None:
    one = ledger(salt_is_tenant=True)
    (event,) = fold(one, store([1, 2], salt="acme"))
    assert event == Stored(Scope("m", "t", None, "acme").scope_id, Tier.HBM, hashes(0, 2), None, 0)


def test_extra_keys_are_hashed_with_the_salt_before_the_digest() -> None:
    one = ledger()
    (event,) = fold(one, store([1, 2], salt="acme", extra_keys=[[["img", 1], b"\x01"], [["img", -1]]]))
    assert event.hashes == extend_chain(TOKENS[:4], 2, None, [[["img", 1], "acme", b"\x01"], [["img", -1]]])


def test_two_engine_hashes_of_one_block_are_one_residency() -> None:
    """Engines hash what they do not tell (vLLM before 0.17: the salt)."""
    one = ledger()
    fold(one, store([1]))
    assert fold(one, store([77])) == []
    assert fold(one, EngineRemoved([1])) == []
    assert fold(one, EngineRemoved([77])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_a_hash_that_two_salts_share_stands_for_both_blocks() -> None:
    one = ledger()
    (a,) = fold(one, store([1, 2], salt="a"))
    (b,) = fold(one, store([1, 2], salt="b"))
    assert a.hashes != b.hashes and one.announced_blocks == 4
    (more,) = fold(one, store([3], 2, 2, salt="b"))
    assert more.parent == b.hashes[8:]
    # block 2 of "b" has a child, and leaves go first: the copies that go are those of "a", whatever order they are told in
    assert fold(one, EngineRemoved([1]), EngineRemoved([2])) == [Removed(SCOPE_ID, Tier.HBM, reverse(a.hashes))]
    assert one.counters.judged_removals == 0
    assert {name for _, _, name in one.resident()} == {1, 2, 3}
    assert fold(one, EngineRemoved([3, 2, 1])) == [Removed(SCOPE_ID, Tier.HBM, more.hashes + reverse(b.hashes))]
    assert not set(one.resident()) and not one.announced_blocks


def test_where_a_removal_may_be_of_several_blocks_none_of_them_is_claimed() -> None:
    one = ledger()
    (a,) = fold(one, store([1], salt="a"))
    (b,) = fold(one, store([1], salt="b"))
    (gone,) = fold(one, EngineRemoved([1]))
    assert isinstance(gone, Removed) and sorted(hashes_of(gone)) == sorted([a.hashes, b.hashes])
    assert one.counters.judged_removals == 1 and {name for _, _, name in one.resident()} == {1}
    assert fold(one, store([1], salt="a")) == [a]  # two copies, one of "a" for certain
    assert fold(one, EngineRemoved([1])) == [Removed(a.scope_id, Tier.HBM, a.hashes)]
    assert fold(one, EngineRemoved([1])) == [] and not set(one.resident())


def test_a_child_without_a_salt_follows_the_block_without_one_where_an_engine_tells_it_with_every_event() -> None:
    one = ledger(salt_is_tenant=True)
    fold(one, store([1], salt="acme", salt_inherited=False), store([1], salt_inherited=False))
    (child,) = fold(one, store([2], 1, 1, salt_inherited=False))
    assert one.uses[child.scope_id].scope.tenant_id == "default"
    two = ledger(salt_is_tenant=True)
    fold(two, store([1], salt="acme", salt_inherited=False))
    assert fold(two, store([2], 1, 1, salt_inherited=False)) == [] and two.counters.unknown_parent == 1


def test_a_shared_hash_survives_a_dump_and_is_forgotten_whole() -> None:
    one = Ledger(LedgerSettings("m", "t"), remembered_evictions=0)
    fold(one, store([1], salt="a"), store([1], salt="b"), store([1], salt="b"))
    one = Ledger.load(one.dump(), one.settings, remembered_evictions=0)
    assert one.announced_blocks == 2
    fold(one, EngineRemoved([1]))
    assert one.announced_blocks == 1
    fold(one, EngineRemoved([1]), EngineRemoved([1]))
    assert one.announced_blocks == 0 and not one.lineages.known and not one.lineages.namespaces


def test_a_placeholder_of_a_shared_hash_is_a_copy_in_any_scope() -> None:
    one = ledger()
    fold(one, store([1], adapter="a"), store([1], adapter="b"))
    events = fold(one, store([1], token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    assert {event.scope_id for event in events} == {Scope("m", "t", "a").scope_id, Scope("m", "t", "b").scope_id}
    fold(one, EngineCleared(tuple(Tier)))
    assert not one.announced_blocks


def test_removals_of_what_was_never_stored_change_nothing() -> None:
    one = ledger()
    assert fold(one, EngineRemoved([1, 2]), EngineRemoved([3], Tier.LOCAL_SSD)) == []
    assert one.counters.removed_unknown == 3


def test_empty_forgets_everything_and_tells_nothing() -> None:
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
    assert len(one.lineages.known) == 3 and one.counters.forgotten == 7
    assert fold(one, store([50], 0, 1)) == [] and one.counters.unknown_parent == 1


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
def test_settings_that_cant_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        LedgerSettings(**({"model_id": "m", "tokenizer_id": "t"} | wrong))


def test_hashes_are_the_published_check_vector() -> None:
    one = ledger()
    (event,) = fold(one, store(["a"], token_ids=list(range(1, 17)), block_size=16))
    assert event.hashes == pack_hashes([16863443419780771464])


def test_scopes_of_tenants_that_are_gone_are_forgotten() -> None:
    one = Ledger(LedgerSettings("m", "t", salt_is_tenant=True), remembered_evictions=2)
    for tenant in range(100):
        names = [10 * tenant + 1, 10 * tenant + 2]
        told = [*fold(one, store(names, salt=f"tenant-{tenant}")), *fold(one, EngineRemoved(list(reversed(names))))]
        assert all(event.scope_id in one.uses for event in told)
        fold(one, EngineStored([-tenant], None, [1 << 40] * 2, 2, salt=f"unindexable-{tenant}"))
    assert len(one.uses) <= 4
    assert len(one.lineages.namespaces) <= 2
