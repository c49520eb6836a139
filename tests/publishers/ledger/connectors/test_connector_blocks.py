"""A connector's chunks that are larger than the engine's blocks, and stores whose removals are never reported."""

from typing import Any

import msgpack
import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineBatch, EngineRemoved, EngineStored
from kvatlas_publishers.engines.sglang import decode_batch as decode_sglang
from kvatlas_publishers.engines.vllm import decode_batch
from kvatlas_publishers.ledger.connectors.connector_blocks import TICKS_TO_LIVE
from kvatlas_publishers.ledger.ledger import Ledger
from tests.publishers.ledger.one_chain import fold, ledger, store

CPU, STORE = Tier.CPU_DRAM, Tier.OBJECT_STORE


def chunk(name: int, parent: int | None, first: int, blocks: int = 4) -> EngineStored:
    """An LMCache chunk, under its own hash."""
    tokens = list(range(100 + 2 * first, 100 + 2 * (first + blocks)))
    return EngineStored([name], parent, tokens, 2 * blocks, tier=CPU, offloaded=True)


def tiers(one: Ledger) -> list[int]:
    """Number of blocks announced in each tier."""
    found = [(tier, value) for _, tier, _, value in one.announced()]
    return [len({value for tier, value in found if tier is wanted}) for wanted in (Tier.HBM, CPU, STORE)]


def untold(names: list[int], parent: int | None = None, first: int = 0) -> EngineStored:
    return store(names, parent, first, tier=STORE, offloaded=True, removal_told=False)


def test_a_chunk_holds_all_its_blocks_and_takes_all_with_it() -> None:
    one = ledger(block_size=2)
    fold(one, store([1]), chunk(50, None, 0), chunk(51, 50, 4))
    assert tiers(one) == [1, 8, 0]
    fold(one, EngineRemoved([51], CPU))
    assert tiers(one) == [1, 4, 0]
    again = Ledger.load(one.dump(), one.settings)
    fold(again, EngineRemoved([50], CPU))
    assert tiers(again) == [1, 0, 0]
    fold(again, EngineRemoved([1]))
    assert not again.announced_blocks and not set(again.resident())


def test_a_chunk_stored_twice_is_held_until_it_is_removed_twice() -> None:
    one = ledger(block_size=2)
    fold(one, chunk(50, None, 0), chunk(50, None, 0), EngineRemoved([50], CPU))
    assert tiers(one) == [0, 4, 0]
    fold(one, EngineRemoved([50], CPU))
    assert not set(one.resident())


def test_the_head_of_a_chunk_that_is_gone_is_not_held() -> None:
    one = ledger(block_size=2)
    fold(one, chunk(50, None, 0), chunk(51, 50, 4), EngineRemoved([50], CPU))
    assert tiers(one) == [0, 0, 0]
    fold(one, chunk(50, None, 0))
    assert tiers(one) == [0, 8, 0]


def test_blocks_whose_removal_nobody_tells_are_left_out_and_counted() -> None:
    one = ledger()
    fold(one, store([1, 2]), untold([1, 2, 3]))
    assert tiers(one) == [2, 0, 0] and one.counters.removal_untold == 3
    fold(one, EngineRemoved([1, 2]))
    assert not one.announced_blocks


def test_or_they_are_held_for_a_time_after_they_were_last_stored() -> None:
    one = ledger(keep_untold=True)
    fold(one, store([1, 2, 3]), untold([1, 2]))
    for _ in range(TICKS_TO_LIVE - 1):
        assert one.expire() == []
    fold(one, untold([1, 2, 3]))
    fold(one, EngineRemoved([3, 2, 1]))
    assert tiers(one) == [0, 0, 3]
    for _ in range(TICKS_TO_LIVE - 1):
        assert one.expire() == []
    one.fold(EngineBatch(one.expire()))
    assert tiers(one) == [0, 0, 0] and not set(one.resident())


def test_a_removal_that_is_told_after_all_counts() -> None:
    one = ledger(keep_untold=True)
    fold(one, store([1, 2]), untold([1, 2]), EngineRemoved([2], STORE))
    assert tiers(one) == [2, 0, 1]
    for _ in range(TICKS_TO_LIVE - 1):
        one.expire()
    assert len(one.expire()) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_what_a_saved_ledger_has_in_stores_has_its_time_too(keep: bool) -> None:
    one = ledger(keep_untold=True)
    fold(one, store([1, 2]), untold([1, 2]))
    again = Ledger.load(one.dump(), ledger(keep_untold=keep).settings)
    expired = [again.expire() for _ in range(TICKS_TO_LIVE)]
    again.fold(EngineBatch(expired[-1]))
    assert [len(one) for one in expired] == [0] * (TICKS_TO_LIVE - 1) + [2] and tiers(again) == [2, 0, 0]


def vllm_stored(**fields: Any) -> EngineStored:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, **fields}
    [stored] = decode_batch(msgpack.packb([0.0, [event], None])).events
    assert isinstance(stored, EngineStored)
    return stored


@pytest.mark.parametrize("medium", ["cpu", "MOONCAKE", "L2", "redis", "REMOTE", "REMOTE+CPU"])
def test_a_shared_store_of_vllm_is_no_tier_of_the_workers_own(medium: str) -> None:
    """vLLM's own CPU tier is "CPU"; the store of Mooncake and LMCache's connector in the engine's process are "cpu"."""
    stored = vllm_stored(medium=medium)
    assert (stored.tier, stored.removal_told, stored.offloaded) == (STORE, False, True)


@pytest.mark.parametrize(
    ("fields", "tier", "told"),
    [
        ({}, Tier.HBM, True),
        ({"medium": "GPU", "locality": "REMOTE"}, Tier.REMOTE_HBM, True),
        ({"medium": "CPU"}, CPU, True),
        ({"medium": "STORAGE", "locality": "LOCAL"}, STORE, False),
        ({"medium": "OBJ", "locality": "REMOTE"}, STORE, False),
        ({"medium": "FS"}, Tier.LOCAL_SSD, False),
        ({"medium": "local_disk"}, Tier.LOCAL_SSD, False),
        ({"medium": "STORAGE", "ownership": "kvcr"}, STORE, True),
    ],
)
def test_vllm_tells_removals_of_its_own_tiers_and_of_tiers_that_name_themselves(
    fields: dict[str, str], tier: Tier, told: bool
) -> None:
    stored = vllm_stored(**fields)
    assert (stored.tier, stored.removal_told) == (tier, told)


@pytest.mark.parametrize(("medium", "told"), [("GPU", True), ("CPU_PINNED", True), ("DISK", True), ("EXTERNAL", False)])
def test_sglang_tells_no_removals_of_a_shared_pool(medium: str, told: bool) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "medium": medium}
    [stored] = decode_sglang(msgpack.packb([0.0, [event], None])).events
    assert isinstance(stored, EngineStored) and stored.removal_told is told
