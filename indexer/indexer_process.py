"""One replica: its partitions, their appliers and its other tasks, in a single task group."""

import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from secrets import token_hex
from time import time_ns
from typing import Any

import anyio
import msgpack
from nats.aio.client import Client

from kvatlas.bus.admission import PoisonMessage, PoisonReason
from kvatlas.bus.subjects import events_subject
from kvatlas.bus.wire import WORKER_ID, RawMessage
from kvatlas.fleet.identities import Identities, load_identities
from kvatlas.fleet.records import Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import shard_of
from kvatlas.index.protocol import ApplyResult, ResidencyIndex
from kvatlas.settings import IndexerSettings
from kvatlas_indexer.applier import Applier
from kvatlas_indexer.cleanup.scope_expiry import ScopeExpiry
from kvatlas_indexer.cleanup.scrub_loop import Scrubber
from kvatlas_indexer.cleanup.sweep_loop import Sweeper
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.liveness.failure_detector import FailureDetector
from kvatlas_indexer.liveness.heartbeats import Heartbeats
from kvatlas_indexer.liveness.suspicion import Doubt, DoubtJudge
from kvatlas_indexer.ownership.lease_renewal import Membership
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from kvatlas_indexer.partition.dead_letters import DeadLetters
from kvatlas_indexer.partition.event_stream import EventStream
from kvatlas_indexer.partition.reader import PartitionReader, PartitionStatus
from kvatlas_indexer.repair.grant_server import GrantServer
from kvatlas_indexer.repair.grants import GrantBudget
from kvatlas_indexer.repair.repair_loop import RepairLoop


class Replica:
    """Reads the partitions whose leases it holds, for as long as `run` runs."""

    def __init__(
        self,
        settings: IndexerSettings,
        client: Client,
        calls: Client,
        index: ResidencyIndex,
        fleet: FleetStore,
        stream: EventStream,
        publishers: Sequence[int] = (),
        fleet_id: str | None = None,
    ) -> None:
        """`client`: for the event stream. `calls`: for heartbeats and grant requests, which a publisher may send in any number.
        `publishers`: other partition counts that publishers may use in their subjects. `fleet_id`: the fleet that the store and
        the stream belong to. Raises SettingsError if the file of identities is unusable."""
        self._identities = load_identities(settings.identities, "--identities") if settings.identities else None
        self.member_id = settings.member_id or default_member_id()
        self.counters = counters = IndexerCounters()
        self.status_url: str | None = None
        """URL of the status page."""
        self._client, self._calls = client, calls
        self._index = index
        self._publishers = publishers
        self._fleet_id = fleet_id
        self._stream = stream
        self._doubt = DoubtJudge()
        identities = self._identities or Identities({})
        self._detector = FailureDetector(
            settings.retire_after_s,
            vouches=identities.vouches,
            tenants_of=identities.tenants_of,
            describe_doubt=self._describe_doubt,
        )
        self._grants = GrantBudget()
        self._dead_letters = DeadLetters(
            client, counters, replicas=settings.stream_replicas, storage=settings.stream_storage
        )
        self._appliers = [
            Applier(shard, index, counters, on_applied=self._on_applied, on_refused=self._on_refused)
            for shard in range(index.shards)
        ]
        self.owned = OwnedPartitions(index.partitions, self._new_reader, (self._doubt, self._detector, self._grants))
        heartbeats = Heartbeats(
            client=calls,
            index=index,
            fleet=fleet,
            owned=self.owned,
            detector=self._detector,
            doubt=self._doubt,
            counters=counters,
            identities=self._identities,
            fleet_id=fleet_id,
            delete_record_after_s=2.0 * settings.stream_max_age_s,
        )
        self.owned.on_start(heartbeats.adopt)
        self._repair = RepairLoop(
            client=client,
            index=index,
            owned=self.owned,
            doubt=self._doubt,
            grants=self._grants,
            heartbeats=heartbeats,
            counters=counters,
            partitions=0 if publishers else index.partitions,
            most_blocks=identities.most_blocks,
        )
        self._sweeper = Sweeper(index, counters, self.owned)
        self.membership = Membership(
            self.member_id, index.partitions, fleet=fleet, client=client, owned=self.owned, counters=counters
        )
        self._tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(applier.run for applier in self._appliers),
            self._dead_letters.run,
            heartbeats.run,
            self._repair.run,
            GrantServer(calls, self.owned, self._grants, counters, (index.partitions, *publishers)).run,
            self._sweeper.run,
            Scrubber(index, counters, self.owned, settings.scrub_period_s).run,
            ScopeExpiry(index, counters, self.owned).run,
        ]

    async def run(self, on_settled: Callable[[], None] | None = None) -> None:
        """Run until cancelled, then release the leases immediately. `on_settled` is called once, when the first leases are held
        (or other replicas hold them all)."""
        async with anyio.create_task_group() as group:
            self.owned.run_in(group)
            for task in self._tasks:
                group.start_soon(task)
            group.start_soon(self.membership.run, on_settled)

    # ------------------------------------------------------------ state

    @property
    def ready(self) -> bool:
        """True if NATS is connected and the leases are alive."""
        return self._client.is_connected and self._calls.is_connected and self.membership.fresh

    @property
    def stream_partitions(self) -> int:
        return self._index.partitions

    @property
    def partitions(self) -> list[PartitionStatus]:
        """The owned partitions, in ascending order."""
        return self.owned.status(time_ns() // 1_000)

    @property
    def doubts(self) -> Mapping[str, Doubt]:
        """Workers of owned partitions that are currently in doubt."""
        return self._doubt.doubts

    @property
    def workers(self) -> Mapping[str, Liveness]:
        """Workers of owned partitions."""
        return self._detector.workers

    @property
    def workers_lost(self) -> int:
        """Workers of owned partitions that fell silent without announcing their departure."""
        return self._detector.lost_now

    @property
    def workers_without_room(self) -> int:
        """Workers of the owned shards that the index leaves out because the store is out of memory."""
        return self._repair.without_room

    @property
    def shards_out_of_memory(self) -> int:
        """Owned shards whose store has no memory left."""
        return len(self._repair.out_of_memory)

    @property
    def shards_evicting(self) -> int:
        """Owned shards whose store evicts keys: evicted blocks are missing from answers."""
        return len(self._repair.evicting)

    @property
    def retired_holders(self) -> int:
        """Retired holders that still have blocks, in the shards that this replica sweeps."""
        return sum(self._sweeper.left.values())

    @property
    def granted_bytes(self) -> int:
        """Bytes of snapshots that have been granted but have not arrived yet."""
        return self._grants.outstanding_bytes

    # ------------------------------------------------------------ wiring

    def _new_reader(self, partition: int) -> PartitionReader:
        return PartitionReader(
            partition,
            client=self._client,
            stream=self._stream,
            index=self._index,
            applier=self._appliers[shard_of(partition, self._index.shards)],
            dead_letters=self._dead_letters,
            counters=self.counters,
            identities=self._identities,
            publishers=self._publishers,
            fleet_id=self._fleet_id,
        )

    def _on_applied(self, applied: ApplyResult, traces: Mapping[str, str]) -> None:
        self._grants.release_answering(applied.records)
        applied_to = [record.worker_id for record in applied.records]
        self._detector.record_applied(applied_to, traces, time_ns() // 1_000)

    def _describe_doubt(self, worker_id: str) -> str:
        doubt = self._doubt.doubt_of(worker_id)
        return "" if doubt is None else doubt.text

    def _on_refused(self, partition: int, message: RawMessage, error: Exception) -> None:
        subject = events_subject(message[WORKER_ID], self._index.partitions)
        poison = PoisonMessage(PoisonReason.REFUSED, f"{type(error).__name__} {error}")
        self._dead_letters.put(partition, subject, msgpack.packb(message), poison)


def default_member_id() -> str:
    """Host, process and a random part; unique to each replica."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}-{os.getpid()}-{token_hex(3)}"
