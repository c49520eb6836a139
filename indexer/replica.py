"""One replica: its partitions, their appliers, and the tasks beside them, in one task group."""

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from time import time_ns

import anyio
import msgpack
from anyio.abc import TaskGroup
from nats.aio.client import Client

from indexer.applier import Applier
from indexer.cleanup.scope_expiry import UnusedScopes
from indexer.cleanup.scrub import Scrubber
from indexer.cleanup.sweeper import Sweeper
from indexer.counters import IndexerCounters
from indexer.liveness.heartbeats import Heartbeats
from indexer.liveness.judge import LivenessJudge
from indexer.ownership.membership import Membership
from indexer.partition.admission import Poison, Refused
from indexer.partition.dead_letters import DeadLetters
from indexer.partition.reader import PartitionReader
from indexer.repair.doubt import Doubt, DoubtJudge
from indexer.repair.grants import GrantBudget
from indexer.repair.repair import Repair
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import events_subject
from kvatlas.bus.wire import RawMessage
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import Liveness
from kvatlas.fleet.store import FleetStore
from kvatlas.identity import partition_of, shard_of
from kvatlas.index.protocol import ApplyResult, ResidencyIndex
from kvatlas.settings import IndexerSettings

WORKERS_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One owned partition. `pending`: messages of it that are not applied; `lag_us`: age of the last applied message,
    None before the first; `at_end`: nothing is known to be missing."""

    partition: int
    pending: int
    lag_us: int | None
    applied_seq: int | None
    at_end: bool


@dataclass(slots=True)
class _Running:
    reader: PartitionReader
    scope: anyio.CancelScope
    ended: anyio.Event


class Replica:
    """Reads the partitions whose leases it holds, for as long as `run` runs."""

    def __init__(self, settings: IndexerSettings, client: Client, index: ResidencyIndex, fleet: FleetStore) -> None:
        self.member_id = settings.member_id or default_member_id()
        self.counters = IndexerCounters()
        self.status_url: str | None = None
        """Where the status page is served."""
        self._stream = stream_settings(settings)
        self._client = client
        self._index = index
        self._partition_of: dict[str, int] = {}
        self._running: dict[int, _Running] = {}
        self._group: TaskGroup | None = None
        self._stream_lock = anyio.Lock()
        self._doubt = DoubtJudge()
        self._liveness = LivenessJudge(settings.retire_after_s)
        self._grants = GrantBudget()
        self._dead_letters = DeadLetters(
            client, self.counters, replicas=settings.stream_replicas, storage=settings.stream_storage
        )
        self._appliers = [
            Applier(shard, index, self.counters, on_applied=self._on_applied, on_refused=self._on_refused)
            for shard in range(index.shards)
        ]
        self._heartbeats = Heartbeats(
            client=client,
            index=index,
            fleet=fleet,
            liveness=self._liveness,
            doubt=self._doubt,
            counters=self.counters,
            owns=self._owns,
            on_gone=self._on_gone,
            forget_after_s=2.0 * settings.stream_max_age_s,
        )
        self._repair = Repair(
            client=client,
            index=index,
            doubt=self._doubt,
            grants=self._grants,
            counters=self.counters,
            owned=self._owned,
            at_end=self._at_end,
            start_over=self._start_over,
            on_records=self._heartbeats.on_records,
        )
        self._sweeper = Sweeper(index, self.counters, self._owned)
        self._unused_scopes = UnusedScopes(index, self.counters, self._owned)
        self._scrubber = Scrubber(index, self.counters, self._owned, settings.scrub_period_s)
        self.membership = Membership(
            self.member_id,
            index.partitions,
            fleet=fleet,
            client=client,
            counters=self.counters,
            start=self._start,
            stop=self._stop,
        )

    async def run(self, on_settled: Callable[[], None] | None = None) -> None:
        """Until cancelled; then its leases are given up at once. `on_settled` is called once, when the first leases are
        held (or all are others')."""
        async with anyio.create_task_group() as self._group:
            for applier in self._appliers:
                self._group.start_soon(applier.run)
            self._group.start_soon(self._dead_letters.run)
            self._group.start_soon(self._heartbeats.run)
            self._group.start_soon(self._repair.run)
            self._group.start_soon(self._sweeper.run)
            self._group.start_soon(self._scrubber.run)
            self._group.start_soon(self._unused_scopes.run)
            self._group.start_soon(self.membership.run, on_settled)

    # ------------------------------------------------------------ what it knows

    @property
    def ready(self) -> bool:
        """Is NATS there, and are the leases alive?"""
        return self._client.is_connected and self.membership.fresh

    @property
    def partitions(self) -> list[PartitionStatus]:
        """The owned partitions, ascending."""
        now_us = time_ns() // 1_000
        return [self._status(running.reader, now_us) for _, running in sorted(self._running.items())]

    @property
    def doubts(self) -> Mapping[str, Doubt]:
        """Workers of owned partitions that are in doubt now."""
        return self._doubt.open

    @property
    def workers(self) -> Mapping[str, Liveness]:
        """Workers of owned partitions."""
        return self._liveness.workers

    @property
    def workers_without_room(self) -> int:
        """Workers of the owned shards that are left out because the store is out of memory."""
        return self._repair.without_room

    @property
    def shards_out_of_memory(self) -> int:
        """Owned shards whose store has no memory left."""
        return len(self._repair.out_of_memory)

    @property
    def shards_evicting(self) -> int:
        """Owned shards whose store evicts keys by itself: what it evicted is missing in answers."""
        return len(self._repair.evicting)

    @property
    def retired_holders(self) -> int:
        """Retired holders that still have blocks, in the shards that this replica sweeps."""
        return sum(self._sweeper.left.values())

    @property
    def granted_bytes(self) -> int:
        """Bytes of snapshots that were granted and have not come yet."""
        return self._grants.outstanding_bytes

    def _status(self, reader: PartitionReader, now_us: int) -> PartitionStatus:
        feed = reader.feed
        if feed is None:
            return PartitionStatus(reader.partition, 0, None, None, False)
        lag_us = now_us - feed.applied_ts_us if feed.applied_ts_us is not None else None
        return PartitionStatus(reader.partition, feed.pending + len(feed), lag_us, feed.applied_seq, reader.at_end)

    # ------------------------------------------------------------ partitions

    def _start(self, partitions: Sequence[int]) -> None:
        assert self._group is not None
        for partition in partitions:
            reader = PartitionReader(
                partition,
                client=self._client,
                index=self._index,
                applier=self._appliers[shard_of(partition, self._index.shards)],
                dead_letters=self._dead_letters,
                counters=self.counters,
                ensure_stream=self._ensure_stream,
            )
            running = _Running(reader, anyio.CancelScope(), anyio.Event())
            self._running[partition] = running
            self._group.start_soon(_run, running)
        self._heartbeats.adopt()

    async def _stop(self, partitions: Sequence[int]) -> None:
        stopped = [self._running.pop(partition) for partition in partitions if partition in self._running]
        for running in stopped:
            running.scope.cancel()
        for running in stopped:
            await running.ended.wait()
        self._doubt.forget([worker_id for worker_id in self._doubt.workers if not self._owns(worker_id)])
        self._liveness.forget(lambda worker_id: not self._owns(worker_id))
        for worker_id in [w for w in self._heartbeats.traces if not self._owns(w)]:
            del self._heartbeats.traces[worker_id]
        self._grants.forget(lambda worker_id: not self._owns(worker_id))

    async def _ensure_stream(self) -> None:
        async with self._stream_lock:
            await ensure_stream(self._client, self._stream)

    # ------------------------------------------------------------ questions of the tasks

    def _owned(self) -> Collection[int]:
        return self._running.keys()

    def _owns(self, worker_id: str) -> bool:
        return self._partition(worker_id) in self._running

    def _at_end(self, worker_id: str) -> bool:
        running = self._running.get(self._partition(worker_id))
        return running is not None and running.reader.at_end

    def _start_over(self, partition: int, why: str) -> None:
        running = self._running.get(partition)
        if running is not None and running.reader.feed is not None:
            running.reader.feed.fail(why)

    def _partition(self, worker_id: str) -> int:
        partition = self._partition_of.get(worker_id)
        if partition is None:
            if len(self._partition_of) >= WORKERS_REMEMBERED:
                self._partition_of.clear()
            partition = self._partition_of[worker_id] = partition_of(worker_id, self._index.partitions)
        return partition

    def _on_applied(self, applied: ApplyResult, traces: Mapping[str, str]) -> None:
        self._repair.on_applied(applied)
        self._heartbeats.traces.update(traces)

    def _on_refused(self, partition: int, message: RawMessage, error: InvalidValue) -> None:
        subject = events_subject(message[1], self._index.partitions)
        self._dead_letters.put(partition, subject, msgpack.packb(message), Refused(Poison.SCOPE, str(error)))

    def _on_gone(self, worker_id: str) -> None:
        self._doubt.forget([worker_id])
        self._liveness.forget(lambda other: other == worker_id)
        self._heartbeats.traces.pop(worker_id, None)


def stream_settings(settings: IndexerSettings) -> StreamSettings:
    """How the event stream is made where it is not there yet."""
    return StreamSettings(
        replicas=settings.stream_replicas,
        max_bytes=settings.stream_max_bytes,
        max_age_s=settings.stream_max_age_s,
        storage=settings.stream_storage,
    )


def default_member_id() -> str:
    """Host, process and a random part: no two replicas are ever called the same."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}-{os.getpid()}-{token_hex(3)}"


async def _run(running: _Running) -> None:
    try:
        with running.scope:
            await running.reader.run()
    finally:
        running.ended.set()
