"""The blocks that an engine's hashes stand for: parents, namespaces, placeholders, block sizes."""

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Cleared, Removed, Stored
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineRemoved
from kvatlas_publishers.ledger.ledger import Ledger
from tests.publishers.ledger.one_chain import SCOPE_ID, TOKENS, fold, hashes, held, ledger, reverse, store


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


def test_a_block_removed_before_its_parent_was_known_is_not_announced_with_it() -> None:
    one = ledger()
    fold(one, store([3], 2, 2), store([3], 2, 2), EngineRemoved([3]), store([4], 3, 3))
    fold(one, store([1, 2]))
    assert held(one) == {("hbm", 1), ("hbm", 2), ("hbm", 3), ("hbm", 4)}
    assert fold(one, EngineRemoved([3])) == [Removed(SCOPE_ID, Tier.HBM, reverse(hashes(2, 4)))]
    two = ledger()
    fold(two, store([3], 2, 2), EngineRemoved([3]), store([1, 2]))
    assert held(two) == {("hbm", 1), ("hbm", 2)}


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
    fold(one, store([1, 2], token_ids=[5, 6], group=1))
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


def test_the_salt_is_an_extra_key_of_the_first_block_only() -> None:
    one = ledger()
    (event,) = fold(one, store([1, 2], salt="acme"))
    assert event.hashes == extend_chain(TOKENS[:4], 2, None, [["acme"]])
    (more,) = fold(one, store([3], 2, 2))  # vLLM names the salt only with the first block
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
    """Engines hash keys that their events leave out (vLLM before 0.17: the salt)."""
    one = ledger()
    fold(one, store([1]))
    assert fold(one, store([77])) == []
    assert fold(one, EngineRemoved([1])) == []
    assert fold(one, EngineRemoved([77])) == [Removed(SCOPE_ID, Tier.HBM, hashes(0, 1))]


def test_a_child_without_a_salt_follows_the_block_without_one_if_every_event_has_its_salt() -> None:
    one = ledger(salt_is_tenant=True)
    fold(one, store([1], salt="acme", salt_inherited=False), store([1], salt_inherited=False))
    (child,) = fold(one, store([2], 1, 1, salt_inherited=False))
    assert one.uses[child.scope_id].scope.tenant_id == "default"
    two = ledger(salt_is_tenant=True)
    fold(two, store([1], salt="acme", salt_inherited=False))
    assert fold(two, store([2], 1, 1, salt_inherited=False)) == [] and two.counters.unknown_parent == 1
