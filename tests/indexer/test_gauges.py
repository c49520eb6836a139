"""A replica's metrics of the index that it shares with others."""

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from kvatlas.blocks.residency import IndexMetrics, ModelBlocks, TierBlocks
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.store.connection import Store
from kvatlas_indexer import gauges
from kvatlas_indexer.gauges import MAX_MODELS, OTHER_MODELS, StoreGauges, largest_models, measure
from kvatlas_indexer.partition.reader import PartitionStatus
from tests.eventually import until


class MeasuredIndex(MemoryIndex):
    def __init__(self) -> None:
        super().__init__()
        self.measured = 0

    async def metrics(self) -> IndexMetrics:
        self.measured += 1
        return await super().metrics()


@pytest.mark.anyio
async def test_only_the_owner_of_the_first_partition_reads_the_size_of_the_index(store: Store) -> None:
    index = MeasuredIndex()
    assert await measure([1, 2, 63], index, store) is None
    unasked = index.measured
    size, memory = await measure([0, 5], index, store) or (None, None)
    assert size == IndexMetrics({}) and (unasked, index.measured) == (0, 1)
    assert isinstance(memory, StoreGauges) and memory.used_bytes > 0


def test_the_largest_models_have_names_and_the_others_are_summed() -> None:
    models = {f"m{n}": ModelBlocks(TierBlocks(hbm=n), TierBlocks(hbm=100 * n)) for n in range(1, MAX_MODELS + 4)}
    named = largest_models(models)
    assert named.pop(OTHER_MODELS) == ModelBlocks(TierBlocks(hbm=1 + 2 + 3), TierBlocks(hbm=600))
    assert named == {name: held for name, held in models.items() if sum(held.blocks) > 3}
    few = {"m": ModelBlocks()}
    assert largest_models(few) == few


@pytest.mark.anyio
async def test_a_sample_follows_a_change_of_the_partitions_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[set[int]] = []

    def read_gauges(replica: Any) -> gauges.ReplicaGauges:
        sampled.append(set(replica.owned.partitions))
        return gauges.ReplicaGauges()

    monkeypatch.setattr(gauges, "metrics_enabled", lambda: True)
    monkeypatch.setattr(gauges, "gauges_of", read_gauges)
    replica = SimpleNamespace(owned=SimpleNamespace(partitions=[]), partitions=[])
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gauges.sample, cast(Any, replica), MemoryIndex(), store, 600.0)
            await until(lambda: sampled, what="the first sample")
            replica.partitions = [PartitionStatus(7, 0, None, None, True)]
            replica.owned.partitions = [7]
            await until(lambda: {7} in sampled, what="a sample with the new partition")
            tasks.cancel_scope.cancel()
    assert sampled == [set(), {7}]
