"""What an exporter reads of a replica: sampled in the event loop at intervals, only if metrics are on."""

import logging
from collections import Counter
from dataclasses import dataclass

import anyio
from redis.exceptions import RedisError

from indexer.replica import Replica
from kvatlas.blocks.residency import IndexMetrics
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import Liveness
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.telemetry import export_metrics, metrics_enabled

SAMPLE_S = 10.0

log = logging.getLogger("kvatlas.indexer")


@dataclass(slots=True)
class ReplicaGauges:
    """One replica's owned partitions at the last sample."""

    partitions_owned: int = 0
    messages_pending: int = 0
    workers_alive: int = 0
    workers_lost: int = 0
    workers_in_doubt: int = 0
    workers_without_room: int = 0
    shards_out_of_memory: int = 0
    shards_evicting: int = 0
    retired_holders: int = 0
    granted_snapshot_bytes: int = 0


def gauges_of(replica: Replica) -> ReplicaGauges:
    partitions = replica.partitions
    liveness = Counter(replica.workers.values())
    return ReplicaGauges(
        partitions_owned=len(partitions),
        messages_pending=sum(partition.pending for partition in partitions),
        workers_alive=liveness[Liveness.ALIVE],
        workers_lost=liveness[Liveness.LOST],
        workers_in_doubt=len(replica.doubts),
        workers_without_room=replica.workers_without_room,
        shards_out_of_memory=replica.shards_out_of_memory,
        shards_evicting=replica.shards_evicting,
        retired_holders=replica.retired_holders,
        granted_snapshot_bytes=replica.granted_bytes,
    )


async def sample(replica: Replica, index: ResidencyIndex, sample_s: float = SAMPLE_S) -> None:
    """Sample until cancelled; return at once if metrics are off. The index's gauges are of the whole index, and the same
    from every replica."""
    if not metrics_enabled():
        return
    gauges = ReplicaGauges()
    whole: IndexMetrics | None = None
    with export_metrics("replica", lambda: gauges), export_metrics("index", lambda: whole):
        while True:
            gauges = gauges_of(replica)
            try:
                whole = await index.metrics()
            except (KvatlasError, RedisError) as error:
                log.debug("index not measured: %s", error)
            await anyio.sleep(sample_s)
