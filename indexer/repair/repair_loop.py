"""Every second, reads the records of the owned shards' workers, and requests snapshots of the workers in doubt."""

import logging
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.subjects import control_subject
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.identity import shard_of
from kvatlas.index.protocol import ResidencyIndex, Room, WorkerRecord
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.telemetry import inject_headers, snapshot_request_span
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.liveness.heartbeats import Heartbeats
from kvatlas_indexer.liveness.suspicion import Doubt, DoubtJudge, SnapshotRequest
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from kvatlas_indexer.repair.grants import GrantBudget

JUDGE_EVERY_S = 1.0
LEFT_OUT_S = 600.0
"""Pause before a snapshot is requested from a worker that had more blocks than it is allowed to have."""
ROOM_FRACTION = 0.1
"""Share of the memory that must be free before snapshots are requested from workers for which the store had no memory."""

log = logging.getLogger("kvatlas.indexer")


class RepairLoop:
    def __init__(
        self,
        *,
        client: Client,
        index: ResidencyIndex,
        owned: OwnedPartitions,
        doubt: DoubtJudge,
        grants: GrantBudget,
        heartbeats: Heartbeats,
        counters: IndexerCounters,
        partitions: int,
        most_blocks: Callable[[str], int | None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`partitions`: the partition count that a publisher must use if its messages are to be read; 0: any of several.
        `most_blocks`: how many blocks a worker may have in the index; None: any number."""
        self._client = client
        self._partitions = partitions
        self._most_blocks = most_blocks
        self._index = index
        self._owned = owned
        self._doubt = doubt
        self._grants = grants
        self._heartbeats = heartbeats
        self._counters = counters
        self._clock = clock
        self._inbox = client.new_inbox()
        self._log = RateLimitedLog(log)
        self._left_out: dict[str, float] = {}
        """Workers that had too many blocks, and when a snapshot of each is requested again."""
        self.evicting: set[int] = set()
        """The owned shards whose store evicts keys."""
        self.out_of_memory: set[int] = set()
        """The owned shards whose store is out of memory."""
        self.without_room = 0
        """Number of workers of the owned shards for which the store had no memory."""

    async def run(self) -> None:
        """Run until cancelled. After an error from NATS or the store, the next round begins as usual."""
        subscription = await self._client.subscribe(self._inbox, cb=self._on_reply)
        try:
            while True:
                await anyio.sleep(JUDGE_EVERY_S)
                try:
                    await self.tick()
                except (KvatlasError, RedisError, NatsError) as error:
                    log.warning("workers' records were not checked (%s), retrying in %g s", error, JUDGE_EVERY_S)
        finally:
            await unsubscribe(subscription, self._client)

    async def tick(self) -> None:
        """Run one round: judge the workers, and request snapshots."""
        records: dict[str, WorkerRecord] = {}
        rooms: dict[int, Room] = {}
        for shard in sorted({shard_of(partition, self._index.shards) for partition in self._owned.partitions}):
            rooms[shard] = await self._index.room(shard)
            for record in await self._index.records(shard):
                records[record.worker_id] = record
        self._check_memory(rooms)
        await self._close_too_large(records)
        self._heartbeats.watch_records(records.values())
        self._grants.release_answering(records.values())
        requests = self._doubt.judge(records, self._owned.at_end, self._clock())
        await self._restart_unknown_partitions()
        self.without_room = sum(record.oom for record in records.values())
        for request in requests:
            if self._clock() < self._left_out.get(request.worker_id, -inf):
                continue
            known = records.get(request.worker_id)
            if known is None or not known.oom or self._has_room(rooms, known):
                await self._request(request)

    async def _close_too_large(self, records: Mapping[str, WorkerRecord]) -> None:
        """Take workers that have more blocks than their publishers' identities allow out of the index. One publisher must not
        be able to fill the store, because there would then be no memory left for the next message of any worker."""
        self._left_out = {worker_id: at_s for worker_id, at_s in self._left_out.items() if worker_id in records}
        limits = {
            worker_id: most
            for worker_id, record in records.items()
            if (record.answering or record.loading) and (most := self._most_blocks(worker_id)) is not None
        }
        for worker_id, blocks in (await self._index.claimed(list(limits))).items():
            if blocks <= limits[worker_id] or not await self._index.retire(worker_id, records[worker_id].incarnation):
                continue
            self._counters.workers_too_large += 1
            self._left_out[worker_id] = self._clock() + LEFT_OUT_S
            line = (
                f"worker {worker_id}: left out of the index for {LEFT_OUT_S / 60:g} minutes, since it claims {blocks:,} "
                f"blocks, but its publisher's identity allows {limits[worker_id]:,}"
            )
            self._log.report(f"too large {worker_id}", line, logging.ERROR)

    def _has_room(self, rooms: Mapping[int, Room], record: WorkerRecord) -> bool:
        """True if a snapshot of the worker would fit. If it would not, it would be sent in vain, and the worker closed
        again."""
        return rooms[shard_of(record.partition, self._index.shards)].free >= ROOM_FRACTION

    async def _restart_unknown_partitions(self) -> None:
        """Restart partitions whose position has disappeared from the store. The reader of a quiet partition would notice only
        at the next message, and lose that message; that is why this check comes before a snapshot is requested."""
        unknown = [worker_id for worker_id, doubt in self._doubt.doubts.items() if doubt is Doubt.UNKNOWN]
        for partition in {self._owned.partition_of(worker_id) for worker_id in unknown}:
            if await self._index.position(partition) is None:
                self._owned.restart(partition, "the store lost its position")

    def _check_memory(self, rooms: Mapping[int, Room]) -> None:
        evicting = {shard for shard, room in rooms.items() if room.evicts}
        for shard in sorted(evicting - self.evicting):
            log.error("shard %d: the store evicts keys; set maxmemory-policy to noeviction", shard)
        self.evicting = evicting
        self.out_of_memory = {shard for shard, room in rooms.items() if room.free <= 0}

    async def _request(self, request: SnapshotRequest) -> None:
        self._counters.snapshots_asked += 1
        self._heartbeats.record_repair(request.worker_id, request.doubt.text)
        log.info(
            "worker %s: requesting a snapshot above incarnation %d (%s)",
            request.worker_id,
            request.above,
            request.doubt.value,
        )
        control = ControlRequest(op=ControlOp.SNAPSHOT, above=request.above, partitions=self._partitions)
        with snapshot_request_span(request.worker_id, above=request.above, doubt=request.doubt.value):
            await self._client.publish(
                control_subject(request.worker_id), control.pack(), reply=self._inbox, headers=inject_headers()
            )

    async def _on_reply(self, msg: Msg) -> None:
        if (msg.headers or {}).get("Status") == "503":
            self._counters.snapshots_unanswered += 1
            return
        try:
            reply = ControlReply.unpack(msg.data)
        except InvalidValue as error:
            self._counters.snapshots_refused += 1
            log.debug("invalid reply to a snapshot request: %s", error)
            return
        if not reply.ok:
            self._counters.snapshots_refused += 1
            log.info("worker %s: publisher refused the snapshot request: %s", reply.worker_id, reply.note)
