"""A KV connector reports offloaded blocks with tokens, but without the salt and the keys that the engine's hash covers."""

from typing import Any

import msgpack
import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.events import Removed, Stored
from kvatlas_publishers.engine_events import EngineCleared, EngineRemoved, EngineStored
from kvatlas_publishers.engines.vllm import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger
from tests.publishers.ledger.one_chain import CHAIN, fold, held, ledger, store


def offloaded(names: list[Any], parent: Any = None, first: int = 0) -> EngineStored:
    return store(names, parent, first, tier=Tier.CPU_DRAM, offloaded=True)


def test_a_known_hash_keeps_its_block() -> None:
    one = ledger()
    (salted,) = fold(one, store([1, 2], salt="acme"))
    (moved,) = fold(one, offloaded([1, 2]))
    assert moved == Stored(salted.scope_id, Tier.CPU_DRAM, salted.hashes)
    fold(one, EngineRemoved([2, 1]))
    assert held(one) == {("cpu_dram", 1), ("cpu_dram", 2)}
    assert fold(one, EngineRemoved([2, 1], Tier.CPU_DRAM)) and not one.announced_blocks


def placeholder(*names: int) -> EngineStored:
    """An event with which vLLM's OffloadingConnector reports stored blocks."""
    return store(list(names), token_ids=[], block_size=0, tier=Tier.CPU_DRAM, offloaded=True)


def test_a_connector_that_stores_a_block_again_was_reset_without_a_report() -> None:
    """vLLM resets it while requests run, although it then refuses to reset the device's own cache."""
    one = ledger()
    fold(one, store([1, 2, 3]), placeholder(1, 2), placeholder(3))
    fold(one, EngineRemoved([3, 2, 1]))
    assert held(one) == {("cpu_dram", 1), ("cpu_dram", 2), ("cpu_dram", 3)}
    fold(one, placeholder(1), placeholder(2))
    assert held(one) == {("cpu_dram", 1), ("cpu_dram", 2)}
    fold(one, EngineRemoved([2], Tier.CPU_DRAM), placeholder(2))  # evicted, and stored again
    fold(one, EngineCleared((Tier.CPU_DRAM,)), placeholder(1))
    assert held(one) == {("cpu_dram", 1)} and one.counters.cleared_events == 2


def test_a_known_hash_keeps_its_block_although_the_event_names_an_adapter() -> None:
    one = ledger()
    (salted,) = fold(one, store([1, 2], salt="acme", adapter="sql"))
    (moved,) = fold(one, store([1, 2], adapter="sql", tier=Tier.CPU_DRAM, offloaded=True))
    assert moved == Stored(salted.scope_id, Tier.CPU_DRAM, salted.hashes)


def test_an_unknown_hash_is_left_out_if_the_engine_uses_keys() -> None:
    one = ledger()
    fold(one, store([1], salt="acme"))
    assert fold(one, offloaded([7, 8])) == [] and one.counters.placeholder_unknown == 2
    assert fold(one, offloaded([1, 9]))[0].tier is Tier.CPU_DRAM and held(one) == {("hbm", 1), ("cpu_dram", 1)}


def test_an_engine_without_keys_is_believed_and_no_longer_once_it_uses_one() -> None:
    one = ledger(block_size=2)
    (stored,) = fold(one, offloaded([1, 2]))
    assert stored.hashes == CHAIN[:16]
    fold(one, store([1]))  # the engine itself reports which block 1 is
    gone = fold(one, store([9], salt="acme"))
    assert Removed(stored.scope_id, Tier.CPU_DRAM, CHAIN[8:16]) in gone
    assert held(one) == {("hbm", 1), ("cpu_dram", 1), ("hbm", 9)}
    fold(one, EngineRemoved([1, 2], Tier.CPU_DRAM), EngineRemoved([1, 9]))
    assert not one.announced_blocks and not set(one.resident())


@pytest.mark.parametrize("names", [[0, 7], [7, 0]], ids=["parent's hash first", "child's hash first"])
def test_a_chain_that_is_no_longer_believed_is_forgotten_once(names: list[int]) -> None:
    one = ledger(block_size=2)
    fold(one, offloaded(names))
    fold(one, store([50], salt="acme"))
    assert one.announced_blocks == 1
    fold(one, EngineRemoved([50]))
    assert not one.announced_blocks and not one.lineage.known.keys() & set(names)


def test_offloaded_blocks_do_not_teach_the_block_size() -> None:
    one = ledger()
    fold(one, store([1]))
    chunk = EngineStored([50], None, list(range(100, 107)), 7, tier=Tier.CPU_DRAM, offloaded=True)
    assert fold(one, chunk) == [] and one.block_size == 2 and one.announced_blocks == 1


@pytest.mark.parametrize("salted", [True, False])
def test_a_saved_ledger_knows_if_the_engine_used_keys(salted: bool) -> None:
    one = ledger(block_size=2)
    fold(one, store([1], salt="acme" if salted else None), offloaded([5]))
    again = Ledger.load(one.dump(), one.settings)
    fold(again, offloaded([6, 7]))
    assert again.announced_blocks == (1 if salted else 2)
    fold(again, store([9], salt="acme"))
    assert not [tier for tier, _ in held(again) if tier == "cpu_dram"]


def test_vllms_events_of_other_tiers_are_a_connectors() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}
    batch = decode_batch(msgpack.packb([0.0, [event, {**event, "medium": "CPU"}], None]))
    assert [isinstance(one, EngineStored) and one.offloaded for one in batch.events] == [False, True]
