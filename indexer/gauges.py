"""Gauges of a replica, for an exporter: sampled in the event loop, at intervals and whenever its partitions change, if metrics
are on."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial, reduce

import anyio
from redis.exceptions import RedisError

from kvatlas.blocks.residency import IndexMetrics, ModelBlocks
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas.telemetry import MetricSource, export_metrics, metrics_enabled
from kvatlas_indexer.indexer_process import Replica

SAMPLE_S = 10.0
LOOK_S = 0.5
"""Maximum delay of a sample after the partitions have changed, for example when a replica starts and gets its first ones."""
MAX_MODELS = 20
OTHER_MODELS = "(other)"

log = logging.getLogger("kvatlas.indexer")


@dataclass(slots=True)
class ReplicaGauges:
    """One replica's owned partitions at the last sample. `partitions`: the number of partitions in the whole stream."""

    partitions: int = 0
    partitions_owned: int = 0
    messages_pending: int = 0
    workers_alive: int = 0
    workers_lost: int = 0
    workers_in_doubt: int = 0
    workers_without_room: int = 0
    shards_out_of_memory: int = 0
    shards_evicting: int = 0
    retired_holders: int = 0


def gauges_of(replica: Replica) -> ReplicaGauges:
    partitions = replica.partitions
    liveness = Counter(replica.workers.values())
    return ReplicaGauges(
        partitions=replica.stream_partitions,
        partitions_owned=len(partitions),
        messages_pending=sum(partition.pending for partition in partitions),
        workers_alive=liveness[Liveness.ALIVE],
        workers_lost=replica.workers_lost,
        workers_in_doubt=len(replica.doubts),
        workers_without_room=replica.workers_without_room,
        shards_out_of_memory=replica.shards_out_of_memory,
        shards_evicting=replica.shards_evicting,
        retired_holders=replica.retired_holders,
    )


@dataclass(frozen=True, slots=True)
class PartitionGauges:
    """One owned partition, as of the last sample."""

    pending: int


@dataclass(frozen=True, slots=True)
class StoreGauges:
    """The index's store. `limit_bytes` 0: no limit. `workers_missing`: how many workers fell silent within the last hour and
    have not come back."""

    used_bytes: int
    limit_bytes: int
    workers_missing: int = 0


async def sample(replica: Replica, index: ResidencyIndex, store: Store, sample_s: float = SAMPLE_S) -> None:
    """Sample until cancelled. Returns immediately if metrics are off."""
    if not metrics_enabled():
        return
    gauges = ReplicaGauges()
    memory: StoreGauges | None = None
    with (
        export_metrics("replica", lambda: gauges),
        export_metrics("index_work", lambda: index.work),
        export_metrics("store", lambda: memory),
        closing(_SourceByName("index", "model")) as models,
        closing(_SourceByName("partition", "partition")) as partitions,
    ):
        while True:
            owned = set(replica.owned.partitions)
            gauges = gauges_of(replica)
            partitions.update({str(one.partition): PartitionGauges(one.pending) for one in replica.partitions})
            try:
                measured = await measure([one.partition for one in replica.partitions], index, store)
                models.update(largest_models(measured[0].models) if measured else {})
                memory = measured[1] if measured else None
            except (KvatlasError, RedisError) as error:
                log.debug("index not measured: %s", error)
            with anyio.move_on_after(sample_s):
                while set(replica.owned.partitions) == owned:
                    await anyio.sleep(LOOK_S)


async def measure(
    owned: Collection[int], index: ResidencyIndex, store: Store
) -> tuple[IndexMetrics, StoreGauges] | None:
    """Measure the whole index and its store if this replica owns the first partition, and return None otherwise, without
    reading from the store. Only that partition's owner reports the index, so that sums over replicas are right."""
    if 0 not in owned:
        return None
    departures = await FleetStore(store).departures(await store_time_us(store))
    missing = sum(not one.drained for one in departures.values())
    return await index.metrics(), StoreGauges(*await _memory_of(store), missing)


def largest_models(models: Mapping[str, ModelBlocks]) -> dict[str, ModelBlocks]:
    """The MAX_MODELS models with the most blocks, by name, and the sum of all others. (Each name becomes a time series.)"""
    by_size = sorted(models, key=lambda model: (-sum(models[model].blocks), model))
    named = {model: models[model] for model in by_size[:MAX_MODELS]}
    others = [models[model] for model in by_size[MAX_MODELS:]]
    return {**named, OTHER_MODELS: reduce(ModelBlocks.plus, others)} if others else named


class _SourceByName:
    """Exports one group's gauges once for each name; the name is the value of an attribute."""

    def __init__(self, group: str, attribute: str) -> None:
        self._group = group
        self._attribute = attribute
        self._gauges: Mapping[str, object] = {}
        self._sources: dict[str, MetricSource] = {}

    def update(self, gauges: Mapping[str, object]) -> None:
        """Export these gauges from now on, and no others."""
        self._gauges = gauges
        for name in self._sources.keys() - gauges.keys():
            self._sources.pop(name).close()
        for name in gauges.keys() - self._sources.keys():
            self._sources[name] = export_metrics(self._group, partial(self._gauges_of, name), {self._attribute: name})

    def _gauges_of(self, name: str) -> object | None:
        return self._gauges.get(name)

    def close(self) -> None:
        self.update({})


async def _memory_of(store: Store) -> tuple[int, int]:
    """Bytes used and bytes allowed, summed over the primaries."""
    nodes = await store.read_info("memory")
    return sum(node["used_memory"] for node in nodes), sum(node["maxmemory"] for node in nodes)
