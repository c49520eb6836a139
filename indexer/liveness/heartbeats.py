"""Hears heartbeats, and writes what they say of the owned workers for routers (thin; the judge is `liveness`)."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic, time_ns

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from redis.exceptions import RedisError

from indexer.counters import IndexerCounters
from indexer.liveness.judge import LivenessJudge, Retirement
from indexer.liveness.record_expiry import Forgetting
from indexer.repair.doubt import DoubtJudge
from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.fleet.records import Heartbeat
from kvatlas.fleet.store import FleetStore
from kvatlas.index.protocol import ResidencyIndex, WorkerRecord

WRITE_EVERY_S = 1.0
SHORTEST_PAUSE_S = 0.05
"""Between two writes that can't wait."""
ASLEEP_S = 4.0
"""Longer than rounds are apart, shorter than a worker's silence may be: this process itself stood still."""
FORGET_AFTER_S = 3600.0
ADOPT_EVERY_S = 15.0
"""So soon a record that nobody judges is found: a replica that stood still wrote it of a worker that was retired meanwhile,
or a failover of the store brought it back."""

log = logging.getLogger("kvatlas.indexer")


class Heartbeats:
    """One task: hears, judges each second, writes fleet records, retires."""

    def __init__(
        self,
        *,
        client: Client,
        index: ResidencyIndex,
        fleet: FleetStore,
        liveness: LivenessJudge,
        doubt: DoubtJudge,
        counters: IndexerCounters,
        owns: Callable[[str], bool],
        on_gone: Callable[[str], None],
        forget_after_s: float = FORGET_AFTER_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`owns`: is a worker's partition read by this replica? `on_gone` is told of retired workers. Records of workers
        that are closed for `forget_after_s` go."""
        self._client = client
        self._index = index
        self._fleet = fleet
        self._liveness = liveness
        self._doubt = doubt
        self._counters = counters
        self._owns = owns
        self._on_gone = on_gone
        self._clock = clock
        self._urgent = asyncio.Event()
        self._adopt_s = clock() + ADOPT_EVERY_S
        self._ticked_s = clock()
        self._forgetting = Forgetting(forget_after_s)
        self.traces: dict[str, str] = {}
        """W3C traceparent of the last applied batch that an engine's batch led to, by worker, where this replica traces."""

    def adopt(self) -> None:
        """The workers that the fleet store knows of the owned partitions are to be judged too: at once."""
        self._adopt_s = self._clock()
        self._urgent.set()

    def on_records(self, records: Iterable[WorkerRecord]) -> None:
        """What the index knows of workers: those that it holds something of are to be judged, heard or not."""
        owned = [one for one in records if self._owns(one.worker_id)]
        unretired = {one.worker_id for one in owned if one.answering or one.loading or not one.closed}
        self._liveness.held(unretired, self._clock())
        self._forgetting.see(owned, self._clock())

    async def listen(self) -> Subscription:
        """Hears heartbeats until it is unsubscribed."""
        return await self._client.subscribe(ALL_ALIVE, cb=self._on_heartbeat)

    async def run(self) -> None:
        """Until cancelled. Errors of the store are waited out: what could not be written is written later."""
        subscription = await self.listen()
        try:
            while True:
                with anyio.move_on_after(WRITE_EVERY_S):
                    await self._urgent.wait()
                self._urgent.clear()
                try:
                    await self.tick()
                except (KvatlasError, RedisError) as error:
                    self._counters.store_errors += 1
                    log.warning("fleet records are written later: %s", error)
                    await anyio.sleep(WRITE_EVERY_S)
                await anyio.sleep(SHORTEST_PAUSE_S)
        finally:
            if self._client.is_connected:
                with anyio.CancelScope(shield=True):
                    await subscription.unsubscribe()

    async def tick(self) -> None:
        """One round of adopting, judging, writing and retiring."""
        now_s = self._clock()
        if now_s - self._ticked_s > ASLEEP_S:
            self._liveness.slept(now_s - self._ticked_s, now_s)
        self._ticked_s = now_s
        if now_s >= self._adopt_s:
            self._adopt_s = now_s + ADOPT_EVERY_S
            try:
                await self._adopt(now_s)
            except BaseException:
                self._adopt_s = now_s
                raise
        held_back = self._liveness.held_back
        retirements = self._liveness.tick(now_s)
        self._counters.workers_lost = self._liveness.lost
        self._counters.retirements_held += max(0, self._liveness.held_back - held_back)
        changed = self._liveness.take_changed(self.traces)
        try:
            await self._fleet.write(changed)
        except BaseException:
            self._liveness.keep_changed(changed)
            raise
        self._counters.fleet_writes += len(changed)
        # a replica that stood still, and has gone on, writes what it heard last
        await self._fleet.update_existing(self._liveness.lost_records(self.traces))
        for retirement in retirements:
            await self._retire(retirement)
        for worker_id, incarnation in self._forgetting.due(now_s):
            await self._index.forget(worker_id, incarnation)

    async def _adopt(self, now_s: float) -> None:
        """Judges those that the fleet store knows and this replica does not; takes out what is of another pool now, or can't be
        understood (one that lives is written again with its next heartbeat)."""
        entries = await self._fleet.entries(lambda w, pool_id: self._owns(w) and self._liveness.pool_of(w) != pool_id)
        for worker_id, pool_id, record in entries:
            pool_now = self._liveness.pool_of(worker_id)
            if not self._owns(worker_id) or pool_now == pool_id:
                continue  # its partition was given up, or it was heard, meanwhile
            if pool_now is None and record is not None:
                self._liveness.adopt({worker_id: record}, now_s)
            else:
                log.info("worker %s is taken out of pool %s", worker_id, pool_id)
                await self._fleet.forget(worker_id, pool_id)

    async def _retire(self, retirement: Retirement) -> None:
        worker_id = retirement.worker_id
        record = await self._index.record(worker_id)
        # a closed one may still answer by what its last incarnation told
        open_ = record is not None and (record.answering or record.loading or not record.closed)
        if record is not None and open_ and not await self._index.retire(worker_id, record.incarnation):
            return  # it began another incarnation meanwhile
        if retirement.pool_id is not None:
            await self._fleet.forget(worker_id, retirement.pool_id)
        self._counters.workers_retired += 1
        log.info("worker %s is retired: no heartbeat", worker_id)
        self._on_gone(worker_id)

    async def _on_heartbeat(self, msg: Msg) -> None:
        worker_id = msg.subject.rsplit(".", 1)[-1]
        now_s = self._clock()
        self._liveness.pulse(worker_id, now_s)
        if not self._owns(worker_id):
            return
        try:
            beat = Heartbeat.unpack(msg.data)
            if beat.worker_id != worker_id:
                raise InvalidValue(f"heartbeat of worker {beat.worker_id} on {msg.subject}")
        except InvalidValue as error:
            self._counters.heartbeats_bad += 1
            log.debug("heartbeat not understood: %s", error)
            return
        self._counters.heartbeats += 1
        if self._liveness.pool_of(worker_id) not in (None, beat.endpoint.pool_id):
            self.adopt()  # it serves another model now
        self._doubt.hear(worker_id, beat.incarnation, beat.acked_seq, now_s)
        if self._liveness.hear(beat, now_s, time_ns() // 1_000):
            self._urgent.set()
