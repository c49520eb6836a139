"""Events that may report hits: no doubtful copy is claimed, and few real ones are left out."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineDropped,
    EngineEvent,
    EngineRemoved,
    EngineStarted,
    EngineStored,
)
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger import hit_reports
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.fake_engine import recording
from tests.publishers.ledger.one_chain import TOKENS, fold, ledger, store


def prefix(count: int, names: list[int] | None = None, **fields: Any) -> EngineStored:
    """The chain's first blocks: a request's hits, or new copies."""
    event = store(list(range(1, count + 1)), maybe_again=True, **fields)
    return event if names is None else replace(event, hashes=names)


def started() -> Ledger:
    one = ledger()
    fold(one, EngineStarted())
    return one


def test_a_report_adds_no_copy() -> None:
    one = started()
    fold(one, prefix(3), prefix(3), prefix(2), EngineRemoved([3]))
    assert one.announced_blocks == 2
    fold(one, EngineRemoved([2, 1]))
    assert one.announced_blocks == 0


def test_an_event_with_a_block_that_was_not_held_is_of_new_copies() -> None:
    one = started()
    fold(one, prefix(2), prefix(3), EngineRemoved([2, 1]))
    assert one.announced_blocks == 3


def test_blocks_from_before_a_late_join_prove_nothing_until_a_clear() -> None:
    one = ledger()
    fold(one, prefix(2), prefix(3), EngineRemoved([2, 1]))
    assert one.announced_blocks == 0
    fold(one, EngineCleared(), prefix(2), prefix(3), EngineRemoved([2, 1]))
    assert one.announced_blocks == 3


def test_a_doubtful_copy_is_certain_once_a_block_behind_it_is_stored_also_after_a_load() -> None:
    one = started()
    fold(one, prefix(2), prefix(2), EngineRemoved([2, 1]))
    assert one.announced_blocks == 0
    one = Ledger.load(one.dump(), one.settings)
    fold(one, store([3], 2, 2))
    assert one.announced_blocks == 3


@pytest.mark.parametrize("gone", [EngineDropped([1]), EngineRemoved([1], last=True)])
def test_when_all_copies_are_gone_the_doubtful_ones_are_too(gone: EngineEvent) -> None:
    one = started()
    fold(one, prefix(1), prefix(1), gone, store([2], 1, 1))
    assert one.announced_blocks == 0


def test_with_too_many_doubts_those_without_a_copy_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_reports, "MOST_DOUBTS", 2)
    one = started()
    fold(one, prefix(2), prefix(2), EngineRemoved([2, 1]), prefix(6), prefix(6), EngineRemoved([6, 5, 4, 3, 2, 1]))
    fold(one, prefix(1), prefix(2))
    fold(one, EngineRemoved([1]))
    assert one.announced_blocks == 0


def test_of_a_window_only_the_last_reported_block_is_held() -> None:
    one = started()
    full: dict[str, Any] = {"group": 0, "kind": AttentionKind.FULL}
    window: dict[str, Any] = {"group": 1, "kind": AttentionKind.SLIDING_WINDOW, "window_tokens": 3}
    last_two = replace(prefix(4, [3, 4], **window), token_ids=TOKENS[:8])
    fold(one, prefix(4, **full), last_two)
    held = set(one.resident())
    fold(one, prefix(4, **full), prefix(4, **window))
    assert set(one.resident()) == held, "the first two are not there any more"
    fold(one, prefix(4, **full), last_two, EngineRemoved([4], group=0), EngineRemoved([4], group=1))
    assert set(one.resident()) == held, "an event that leaves out blocks is of new copies, in all groups"


def test_an_event_without_a_whole_window_held_is_of_new_copies() -> None:
    """The prompt of a request whose window is gone is computed again, although all blocks of full attention are held."""
    one = started()
    full: dict[str, Any] = {"group": 0, "kind": AttentionKind.FULL}
    window: dict[str, Any] = {"group": 1, "kind": AttentionKind.SLIDING_WINDOW, "window_tokens": 4}
    fold(one, prefix(4, **full), prefix(4, **window), EngineRemoved([3], group=1))
    fold(one, prefix(4, **full), prefix(4, **window), EngineRemoved([4], group=0))
    assert {name for _, group, name in one.resident() if group == 0} == {1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_mixture_of_reports_comes_nothing_is_claimed_that_is_gone(seed: int) -> None:
    """The engine caches copies of one chain's prefixes, and its requests may read the cache or not."""
    chance, one = Random(seed), started()
    copies = [0] * 6
    for _ in range(300):
        events: list[EngineEvent] = []
        cached = next((at for at, count in enumerate(copies) if not count), len(copies))
        if chance.random() < 0.5:
            length = chance.randint(1, len(copies))
            hit = 0 if chance.random() < 0.3 else min(cached, length - 1)
            if hit and chance.random() < 0.5:
                events.append(prefix(hit))
            names = list(range(hit + 1, length + 1))
            events.append(replace(store(names, hit or None, hit), maybe_again=not hit))
            for at in range(hit, length):
                copies[at] += 1
        elif chance.random() < 0.1:
            copies = [0] * len(copies)
            events.append(EngineCleared())
        elif gone := [at for at, count in enumerate(copies) if count]:
            at = chance.choice(gone)
            copies[at] -= 1
            events.append(EngineRemoved([at + 1]))
        fold(one, *events)
        assert {name for _, _, name in one.resident()} <= {at + 1 for at, count in enumerate(copies) if count}
        if chance.random() < 0.05:
            one = Ledger.load(one.dump(), one.settings)


@given(st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_batches_that_are_folded_together_end_as_each_by_itself(random: Random) -> None:
    """Usable residency is settled only at the end of a fold."""
    _, payloads = recording("vllm-0.33.0-bytes")
    batches = [decode_batch(EngineKind.VLLM, payload).events for payload in payloads]
    together, alone = (Ledger(LedgerSettings("m", "m", adapter_ids={"1": "1", "2": "2"})) for _ in range(2))
    for one in (together, alone):
        one.fold(EngineBatch([EngineStarted()]))
    while batches:
        count = random.choice([1, 2, 3, 30, 60, 100])
        together.fold(EngineBatch([event for events in batches[:count] for event in events]))
        for events in batches[:count]:
            alone.fold(EngineBatch(events))
        del batches[:count]
        assert together.digest == alone.digest
