"""The ledger learns an engine's groups, and reacts when they change."""

import pytest

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.errors import InvalidValue
from kvatlas.events import Cleared, Heads, Marked, Removed, SnapshotBegin, Stored, Unmarked
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineRemoved
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from tests.publishers.ledger.one_chain import TOKENS, fold, hashes, held, ledger, reverse, store

FULL, MAMBA, WINDOW = AttentionKind.FULL, AttentionKind.MAMBA, AttentionKind.SLIDING_WINDOW


def marked(one: Ledger) -> int:
    return one.marked_blocks


def test_a_batch_that_shows_another_group_asks_for_a_new_incarnation_with_marks() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL))
    assert (one.dropped, one.take_regrouped()) == (None, False)
    fold(one, store([2], 1, 1, kind=MAMBA, group=1))
    assert (one.dropped, one.take_regrouped(), one.take_regrouped()) == (0, True, False)
    assert one.announced_blocks == 2 and marked(one) == 1


def test_a_batch_unmarks_before_it_removes_and_marks_after_it_stored() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL), store([2], 1, 1, kind=MAMBA, group=1))
    one.take_regrouped()
    events = fold(
        one, EngineRemoved([2], group=1), EngineRemoved([2]), store([7], 1, 1, token_ids=[8, 8], kind=FULL),
        store([7], 1, 1, token_ids=[8, 8], kind=MAMBA, group=1),
    )  # fmt: skip
    assert [type(event) for event in events] == [Unmarked, Removed, Stored, Marked], "the head's bits stay as they were"
    events = fold(one, EngineRemoved([7], group=1))
    assert [type(event) for event in events] == [Unmarked, Heads]


def test_a_clear_takes_the_marks_without_naming_them() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL), store([1, 2], kind=MAMBA, group=1))
    events = fold(one, EngineCleared())
    assert events == [Cleared()] and marked(one) == 0 and one.mark_snapshot() == []


def test_a_group_is_known_on_a_tier_whose_events_do_not_tell_its_kind() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL, group=1), store([2], 1, 1, kind=MAMBA, group=0))
    fold(one, store([2], group=0, token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    assert held(one) == {("hbm", 1), ("hbm", 2)}, "group 0 is mamba on the CPU tier too"
    fold(one, EngineRemoved([2], group=0))
    assert marked(one) == 0, "the state is in the CPU tier, the blocks of full attention are not"
    fold(one, store([1, 2], group=1, token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    assert marked(one) == 1
    fold(one, EngineRemoved([2], Tier.CPU_DRAM, 0))
    assert marked(one) == 0


def test_a_kind_told_late_withdraws_what_was_taken_for_full_attention() -> None:
    one = ledger()
    fold(one, store([1, 2]))
    assert one.announced_blocks == 2
    fold(one, store([1], kind=MAMBA), store([1, 2], kind=FULL, group=1))
    assert one.take_regrouped() and one.announced_blocks == 2 and marked(one) == 2
    fold(one, EngineRemoved([1, 2]), EngineRemoved([1]))
    assert one.announced_blocks == 2 and marked(one) == 0


def test_with_lookahead_hashes_eagle_drops_nothing() -> None:
    one = ledger(eagle=True)
    assert one.reuse.eagle
    fold(one, store([1, 2], kind=FULL, lookahead_tokens=1, lookahead=(7,)))
    assert not one.reuse.eagle and one.reuse.lookahead_tokens == 1 and one.announced_blocks == 2


def test_blocks_with_other_tokens_behind_them_are_other_blocks() -> None:
    """A prompt that forks at a block's end finds only blocks that the engine stored with the prompt's next token."""
    one = ledger(eagle=True)
    [stored] = fold(one, store([1], kind=FULL, lookahead_tokens=1, lookahead=(7,)))
    fold(one, store([2], kind=FULL, lookahead_tokens=1, lookahead=(8,)))
    assert isinstance(stored, Stored) and one.announced_blocks == 2
    [removed] = fold(one, EngineRemoved([1]))
    assert isinstance(removed, Removed) and removed.hashes == stored.hashes and one.announced_blocks == 1


def test_an_event_without_the_tokens_that_its_hashes_cover_tells_nothing_new() -> None:
    one = ledger(eagle=True)
    fold(one, store([1], kind=FULL, lookahead_tokens=1, lookahead=(7,)), store([2], 1, 1, kind=FULL))
    assert one.announced_blocks == 1 and one.counters.unindexable == 1


@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [
        ({}, AttentionKind.CHUNKED_LOCAL, "--chunk-size"),
        ({"chunk_tokens": 3}, AttentionKind.CHUNKED_LOCAL, "chunk size 3"),
        ({}, AttentionKind.OTHER, "unknown kind of attention"),
        ({"granularity": 2}, MAMBA, "granularity is 2"),
        ({}, WINDOW, "window None"),
    ],
)
def test_what_can_not_be_computed_is_an_upper_bound_with_its_reason(
    settings: dict[str, int], kind: AttentionKind, why: str
) -> None:
    one = ledger(**settings)
    fold(one, store([1, 2], kind=FULL), store([2], 1, 1, kind=kind, group=1))
    assert why in one.reuse.upper_bound and one.dropped is None
    assert one.announced_blocks == (1 if "granularity" in settings else 2)


@pytest.mark.parametrize("larger_first", [True, False])
def test_of_two_sizes_of_full_blocks_the_smaller_are_announced_and_both_say_where_to_resume(larger_first: bool) -> None:
    one = ledger(eagle=True, eagle_groups=frozenset({0}))
    small = store([1, 2, 3, 4, 5], kind=FULL)
    large = store([2, 4], block_size=4, token_ids=TOKENS[:8], kind=FULL, group=1)
    for event in (large, small) if larger_first else (small, large):
        fold(one, event)
    assert one.take_regrouped() and one.block_size == 2 and one.announced_blocks == 5 and one.dropped == 1
    assert (marked(one), one.reuse.upper_bound) == (2, ""), "4 and 8 tokens, with the draft's block behind them"
    again = Ledger.load(one.dump(), one.settings)
    assert (again.reuse, again.digest_words) == (one.reuse, one.digest_words)
    fold(one, EngineRemoved([5]))
    assert (one.announced_blocks, marked(one)) == (4, 1)
    fold(one, EngineRemoved([2], group=1))
    assert (one.announced_blocks, marked(one)) == (4, 0)


def test_blocks_of_a_connector_and_of_an_empty_event_do_not_change_a_groups_size() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL), store([2], 1, 1, kind=MAMBA, group=1))
    chunk = store([4], block_size=8, token_ids=TOKENS[:8], kind=FULL, tier=Tier.CPU_DRAM, offloaded=True)
    fold(one, chunk, store([], block_size=64, token_ids=[], kind=FULL))
    assert one.block_size == 2 and marked(one) == 1 and not one.reuse.upper_bound


def test_what_a_hybrid_holds_is_an_upper_bound_if_its_events_tell_no_groups() -> None:
    one = ledger()
    fold(one, store([1, 2]))
    before = one.reuse.upper_bound
    one.learn_hybrid()
    assert not before
    assert one.reuse.upper_bound == "the engine reports full attention only"
    one.empty()
    fold(one, store([1, 2]))
    assert one.reuse.upper_bound == "the engine reports full attention only" and one.announced_blocks == 2


def test_an_adapter_loaded_from_elsewhere_loses_its_blocks_and_only_these() -> None:
    one = ledger()
    fold(one, store([1, 2], kind=FULL), store([11, 12], kind=FULL, adapter="a"))
    fold(one, store([1], kind=MAMBA, group=1), store([11], kind=MAMBA, group=1))
    assert marked(one) == 2
    events = one.forget_adapter("a")
    assert [type(event).__name__ for event in events] == ["Unmarked", "Removed", "Heads"]
    assert events[1].hashes == reverse(hashes(0, 2))  # type: ignore[union-attr]
    assert held(one) == {("hbm", 1), ("hbm", 2)} and marked(one) == 1
    fold(one, EngineRemoved([11, 12]), EngineRemoved([11], group=1))
    fold(one, store([21, 22], kind=FULL, adapter="a"))
    assert one.announced_blocks == 4


def test_a_saved_hybrid_has_its_groups_and_marks_again() -> None:
    one = ledger(eagle=True)
    fold(one, store([1, 2, 3], kind=FULL, lookahead_tokens=1, lookahead=(9,)), store([2], 1, 1, kind=MAMBA, group=1))
    again = Ledger.load(one.dump(), one.settings)
    assert (again.reuse, again.digest_words) == (one.reuse, one.digest_words)
    assert marked(again) == 1 and not again.take_regrouped()
    with pytest.raises(InvalidValue, match="version 9"):
        Ledger.load(b"\x91\x09", LedgerSettings("m", "t"))


def test_a_changelog_begins_the_incarnation_that_says_marks_count() -> None:
    log = Changelog("w", ledger(), PublisherCounters())
    log.require_incarnation(IncarnationReason.START)
    assert log.begin_incarnation(log.next_incarnation(1), 1)
    log.record(EngineBatch([store([1, 2], kind=FULL), store([2], 1, 1, kind=MAMBA, group=1)]))
    log.publish(log.fold(), 2, 0.0)
    assert log.incarnation_due is IncarnationReason.REGROUPED
    assert log.begin_incarnation(log.next_incarnation(2), 2)
    sent = []
    while (one := log.outbox.take()) is not None:
        sent.append(one)
    [message] = [wire.decode(one.payload) for one in sent]
    assert message.events[0] == SnapshotBegin(0)
    assert [type(event) for event in message.events[2:4]] == [Marked, Heads]
