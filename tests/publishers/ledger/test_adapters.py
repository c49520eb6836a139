"""Adapters in the ledger: those without a name, and those that were loaded again from elsewhere."""

from typing import Any

import pytest

from kvatlas.events import EngineRemoved
from kvatlas.identity import Scope
from publishers.engines.vllm import decode_batch
from tests.publishers.hybrid_recordings import FOLDER, Ask, Batch, Repoint, read_hybrid_recording
from tests.publishers.ledger.one_chain import fold, held, ledger, store


def test_an_adapter_that_the_engine_does_not_name_is_left_out() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([11, 12], adapter="1", adapter_named=False))
    assert held(one) == {("hbm", 1), ("hbm", 2)} and one.counters.adapter_unnamed == 2
    fold(one, EngineRemoved([12, 11]))
    assert one.announced_blocks == 2


def test_or_it_has_the_name_that_the_settings_give_its_id() -> None:
    one = ledger(adapter_ids={"1": "sql"})
    fold(one, store([11, 12], adapter="1", adapter_named=False), store([21], adapter="2", adapter_named=False))
    assert {scope for scope, *_ in one.announced()} == {Scope("m", "t", "sql").scope_id}
    assert one.announced_blocks == 2 and one.counters.adapter_unnamed == 1


def test_a_first_block_with_another_hash_is_an_adapter_loaded_from_elsewhere() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([11, 12, 13], adapter="a"), store([21, 22], adapter="b"))
    fold(one, store([31], adapter="a"))
    assert held(one) == {("hbm", name) for name in (1, 2, 21, 22, 31)}
    fold(one, EngineRemoved([13, 12, 11]))
    assert held(one) == {("hbm", name) for name in (1, 2, 21, 22, 31)}
    fold(one, store([32], 31, 1, adapter="a"), store([31], adapter="a"))
    assert ("hbm", 32) in held(one)


@pytest.mark.parametrize("settings", [{"eagle": True}, {}], ids=["eagle", "without an adapter"])
def test_two_hashes_of_one_block_are_no_move_where_an_engine_has_them_anyway(settings: dict[str, Any]) -> None:
    one = ledger(**settings)
    adapter = "a" if settings else None
    fold(one, store([11, 12], adapter=adapter))
    fold(one, store([31], adapter=adapter))
    assert one.counters.forgotten == 0 and ("hbm", 11) in held(one)


def test_without_a_list_of_models_a_moved_adapter_is_known_from_the_next_prompt_computed_with_it() -> None:
    """vLLM's own manager: after the adapter was loaded from another path, nothing of the old one is reused."""
    recording = read_hybrid_recording(FOLDER / "lora-repointed.jsonl.gz")
    one = ledger()
    moves = known = 0
    for step in recording.steps:
        if isinstance(step, Batch):
            before = one.counters.forgotten
            one.fold(decode_batch(step.payload))
            known += one.counters.forgotten > before
        elif isinstance(step, Repoint):
            moves += 1
        else:
            assert isinstance(step, Ask)
    assert 0 < known <= moves
