"""A block's size in bytes, by scope and tier, whatever its source: index, heartbeats and prices use the same number."""

import pytest

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineBatch, EngineStored
from kvatlas_publishers.ledger.block_bytes import BlockBytes
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.ledger.lineage import Lineage
from kvatlas_publishers.settings import PublisherSettings

SCOPE, OTHER = b"scope-id", b"other-id"


def of_ledger(told: int, block_bytes: int = 0) -> Ledger:
    ledger = Ledger(LedgerSettings("m", "m", block_bytes=block_bytes))
    ledger.fold(EngineBatch([EngineStored([1], None, [1, 2, 3, 4], 4, block_bytes=told)]))
    return ledger


def test_what_heartbeats_say_is_what_the_index_has_by_whatever_way_the_size_is_known() -> None:
    """Prices use the former, export and totals the latter."""
    from_event, from_flag, from_metrics = of_ledger(4096), of_ledger(0, block_bytes=4096), of_ledger(0)
    from_metrics.set_told_block_bytes(4096)
    for ledger in (from_event, from_flag, from_metrics):
        assert [use.block_bytes for use in ledger.uses.values()] == [4096]
        endpoint = PublisherSettings(worker_id="w", model_id="m").endpoint(4, ledger.sizes, ledger.reuse)
        assert endpoint.block_bytes == 4096


def test_an_event_goes_before_the_settings_and_these_before_the_metrics() -> None:
    assert of_ledger(4096, block_bytes=32).sizes.block_bytes == 4096
    ledger = of_ledger(0, block_bytes=32)
    ledger.set_told_block_bytes(7)
    assert ledger.sizes.block_bytes == 32


def test_another_tiers_size_is_its_own() -> None:
    block_bytes = BlockBytes(LedgerSettings("m", "m"))
    assert block_bytes.of(SCOPE, 4) == block_bytes.of_worker(4) == (4, 0, ())
    block_bytes.tell(SCOPE, Tier.CPU_DRAM, 50)
    assert block_bytes.of(SCOPE, 4).block_bytes == 50, "better than nothing"
    block_bytes.tell(SCOPE, Tier.HBM, 100)
    assert block_bytes.of(SCOPE, 4) == block_bytes.of_worker(4) == (4, 100, ((Tier.CPU_DRAM, 50),))
    assert block_bytes.of(OTHER, 4) == (4, 0, ())
    block_bytes.forget_scope(SCOPE)
    assert block_bytes.of(SCOPE, 4) == (4, 0, ())


def test_settings_give_the_devices_size_even_if_events_give_another_tiers() -> None:
    block_bytes = BlockBytes(LedgerSettings("m", "m", block_bytes=100))
    block_bytes.tell(SCOPE, Tier.CPU_DRAM, 50)
    assert block_bytes.of(SCOPE, 4) == (4, 100, ((Tier.CPU_DRAM, 50),))


def test_a_tier_that_was_once_listed_stays_in_the_list_since_what_a_message_leaves_out_stays_as_it_was() -> None:
    block_bytes = BlockBytes(LedgerSettings("m", "m", block_bytes=100))
    sizes = []
    for told in (100, 50, 100):
        block_bytes.tell(SCOPE, Tier.CPU_DRAM, told)
        sizes.append(block_bytes.of(SCOPE, 4).tier_bytes)
    assert sizes == [(), ((Tier.CPU_DRAM, 50),), ((Tier.CPU_DRAM, 100),)]
    block_bytes.forget_scope(SCOPE)
    block_bytes.tell(SCOPE, Tier.CPU_DRAM, 100)
    assert block_bytes.of(SCOPE, 4).tier_bytes == ((Tier.CPU_DRAM, 100),), "the index may still have the size before"


def test_an_offloaded_block_without_token_ids_gives_its_tiers_size_too() -> None:
    ledger = of_ledger(4096)
    ledger.fold(EngineBatch([EngineStored([1], None, [], 4, Tier.CPU_DRAM, block_bytes=1024)]))
    assert [use.sizes for use in ledger.uses.values()] == [(4, 4096, ((Tier.CPU_DRAM, 1024),))]
    loaded = Ledger.load(ledger.dump(), LedgerSettings("m", "m"))
    assert [use.sizes for use in loaded.uses.values()] == [(4, 4096, ((Tier.CPU_DRAM, 1024),))]
    assert loaded.sizes == ledger.sizes


def test_the_bytes_of_an_offloaded_block_of_another_size_are_not_those_of_the_engines_blocks() -> None:
    ledger = of_ledger(100)
    ledger.fold(EngineBatch([EngineStored([1], None, [], 16, Tier.CPU_DRAM, block_bytes=400)]))
    assert [use.sizes for use in ledger.uses.values()] == [(4, 100, ())]


class CountingBlockBytes(BlockBytes):
    """Counts how often a scope's sizes are computed."""

    reads = 0

    def of(self, scope_id: bytes, block_size: int | None) -> BlockSizes:
        self.reads += 1
        return super().of(scope_id, block_size)


def test_a_scopes_first_size_costs_the_same_however_many_scopes_there_are() -> None:
    settings = LedgerSettings("m", "m", salt_is_tenant=True)
    block_bytes = CountingBlockBytes(settings)
    lineage = Lineage(settings, block_bytes)
    for number in range(100):
        lineage.tell_block_bytes(lineage.namespace(None, f"tenant{number}", 4), Tier.HBM, 4096)
    assert {use.block_bytes for use in lineage.uses.values()} == {4096}
    assert block_bytes.reads == 200


@pytest.mark.parametrize("told", [0, 4096])
def test_a_saved_ledger_knows_what_events_said_and_not_what_settings_did(told: int) -> None:
    saved = of_ledger(told, block_bytes=32).dump()
    loaded = Ledger.load(saved, LedgerSettings("m", "m", block_bytes=64))
    assert [use.block_bytes for use in loaded.uses.values()] == [told or 64]
    assert loaded.sizes.block_bytes == (told or 64)
