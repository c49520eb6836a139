"""Asks publishers for snapshots where the index is in doubt, and grants them leave to send large ones (thin)."""

import logging
from collections.abc import Callable, Collection, Mapping
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from indexer.repair.doubt import Doubt, DoubtJudge, SnapshotWish
from indexer.repair.grants import GrantBudget
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS, control_subject
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.identity import partition_of
from kvatlas.index.protocol import ApplyResult, ResidencyIndex, Room, WorkerRecord

JUDGE_EVERY_S = 1.0
ROOM_FRACTION = 0.1
"""A worker that the store had no memory for is asked again when so much of it is free."""

log = logging.getLogger("kvatlas.indexer")


class Repair:
    """One task: judges the owned workers each second, asks, and answers grant requests for owned partitions."""

    def __init__(
        self,
        *,
        client: Client,
        index: ResidencyIndex,
        doubt: DoubtJudge,
        grants: GrantBudget,
        counters: IndexerCounters,
        owned: Callable[[], Collection[int]],
        at_end: Callable[[str], bool],
        start_over: Callable[[int, str], None],
        on_records: Callable[[Collection[WorkerRecord]], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`owned`: the partitions this replica reads; `at_end`: is a worker's partition read up to its end?
        `start_over`: read this partition anew, and why. `on_records` gets what each round has read of the owned shards."""
        self._client = client
        self._index = index
        self._doubt = doubt
        self._grants = grants
        self._counters = counters
        self._owned = owned
        self._at_end = at_end
        self._start_over = start_over
        self._on_records = on_records
        self._clock = clock
        self._inbox = client.new_inbox()
        self.evicting: set[int] = set()
        """The owned shards whose store evicts keys by itself."""
        self.out_of_memory: set[int] = set()
        """The owned shards whose store has no memory left."""
        self.without_room = 0
        """Workers of the owned shards whose blocks the store had no memory for."""

    def on_applied(self, applied: ApplyResult) -> None:
        """A call to the index came back: snapshots that it completed free their grants."""
        if self._grants.outstanding_bytes:
            for record in applied.records:
                self._heed(record)

    async def run(self) -> None:
        """Until cancelled; errors of NATS and of the store are waited out."""
        subscriptions = [
            await self._client.subscribe(ALL_GRANTS, cb=self._on_grant_request),
            await self._client.subscribe(self._inbox, cb=self._on_reply),
        ]
        try:
            while True:
                await anyio.sleep(JUDGE_EVERY_S)
                try:
                    await self.tick()
                except (KvatlasError, RedisError, NatsError) as error:
                    log.warning("doubts are judged later: %s", error)
        finally:
            if self._client.is_connected:
                with anyio.CancelScope(shield=True):
                    for subscription in subscriptions:
                        await subscription.unsubscribe()

    async def tick(self) -> None:
        """One round of judging and asking."""
        records: dict[str, WorkerRecord] = {}
        rooms: dict[int, Room] = {}
        for shard in sorted({partition % self._index.shards for partition in self._owned()}):
            rooms[shard] = await self._index.room(shard)
            for record in await self._index.records(shard):
                records[record.worker_id] = record
        self._heed_rooms(rooms)
        self._on_records(records.values())
        for record in records.values():
            self._heed(record)
        wishes = self._doubt.judge(records, self._at_end, self._clock())
        await self._look_for_lost_positions()
        self.without_room = sum(record.oom for record in records.values())
        for wish in wishes:
            known = records.get(wish.worker_id)
            if known is not None and known.oom and rooms[known.partition % self._index.shards].free < ROOM_FRACTION:
                continue  # it would be told in vain, and closed again
            await self._ask(wish)

    async def _look_for_lost_positions(self) -> None:
        """A store that lost everything knows no worker and no position. Readers of quiet partitions would see that only
        at the next message, which would be lost: so it is looked for before a snapshot is asked."""
        unknown = [worker_id for worker_id, doubt in self._doubt.open.items() if doubt is Doubt.UNKNOWN]
        for partition in {partition_of(worker_id, self._index.partitions) for worker_id in unknown}:
            if await self._index.position(partition) is None:
                self._start_over(partition, "the store has no position of it")

    def _heed_rooms(self, rooms: Mapping[int, Room]) -> None:
        evicting = {shard for shard, room in rooms.items() if room.evicts}
        for shard in sorted(evicting - self.evicting):
            log.error("shard %d: the store evicts keys by itself now; expected maxmemory-policy noeviction", shard)
        self.evicting = evicting
        self.out_of_memory = {shard for shard, room in rooms.items() if room.free <= 0}

    def _heed(self, record: WorkerRecord) -> None:
        if record.answering and not record.loading:
            self._grants.answering(record.worker_id, record.incarnation)

    async def _ask(self, wish: SnapshotWish) -> None:
        self._counters.snapshots_asked += 1
        log.info("worker %s is asked for a snapshot above %d: %s", wish.worker_id, wish.above, wish.doubt.value)
        request = ControlRequest(op=ControlOp.SNAPSHOT, above=wish.above)
        await self._client.publish(control_subject(wish.worker_id), request.pack(), reply=self._inbox)

    async def _on_reply(self, msg: Msg) -> None:
        if (msg.headers or {}).get("Status") == "503":
            self._counters.snapshots_unanswered += 1
            return
        try:
            reply = ControlReply.unpack(msg.data)
        except InvalidValue as error:
            self._counters.snapshots_refused += 1
            log.debug("answer to a snapshot request not understood: %s", error)
            return
        if not reply.ok:
            self._counters.snapshots_refused += 1
            log.info("worker %s sends no snapshot: %s", reply.worker_id, reply.note)

    async def _on_grant_request(self, msg: Msg) -> None:
        partition = msg.subject.rsplit(".", 1)[-1]
        if not msg.reply or not partition.isdigit() or int(partition) not in self._owned():
            return
        try:
            request = GrantRequest.unpack(msg.data)
        except InvalidValue as error:
            log.debug("grant request not understood: %s", error)
            return
        if partition_of(request.worker_id, self._index.partitions) != int(partition):
            log.debug("grant request of worker %s for partition %s", request.worker_id, partition)
            return
        reply = self._grants.ask(request, self._clock())
        if reply.granted:
            self._counters.grants_given += 1
        else:
            self._counters.grants_refused += 1
        await self._client.publish(msg.reply, reply.pack())
