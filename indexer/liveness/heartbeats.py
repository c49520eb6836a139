"""Receives heartbeats and writes the owned workers' fleet records for routers (thin: the rules are in `failure_detector`)."""

import logging
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, time_ns

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from redis.exceptions import RedisError

from kvatlas.addresses import check_origin
from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.errors import DATA_ERRORS, InvalidValue, KvatlasError
from kvatlas.fleet.identities import Identities
from kvatlas.fleet.records import EngineEndpoint, FleetRecord, Liveness, Repair, read_heartbeat
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import ResidencyIndex, WorkerRecord
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.sender_quota import FairShare
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_indexer.cleanup.record_expiry import RecordExpiry
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.liveness.failure_detector import FailureDetector, Retirement
from kvatlas_indexer.liveness.suspicion import DoubtJudge
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions

WRITE_EVERY_S = 1.0
SHORTEST_PAUSE_S = 0.05
"""Minimum pause between two urgent rounds."""
PAUSED_S = 4.0
"""A longer gap means that this process stood still. It is longer than the time between two rounds, and shorter than the silence
that a worker is allowed."""
DELETE_RECORD_AFTER_S = 3600.0
ADOPT_EVERY_S = 15.0
"""Time within which a fleet record is found that no replica judges. A paused replica may have written it after the worker was
retired, or a failover of the store may have brought it back."""

log = logging.getLogger("kvatlas.indexer")


class Heartbeats:
    """One task that receives heartbeats, judges every second, writes fleet records, and retires workers."""

    def __init__(
        self,
        *,
        client: Client,
        index: ResidencyIndex,
        fleet: FleetStore,
        owned: OwnedPartitions,
        detector: FailureDetector,
        doubt: DoubtJudge,
        counters: IndexerCounters,
        identities: Identities | None = None,
        fleet_id: str | None = None,
        delete_record_after_s: float = DELETE_RECORD_AFTER_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`identities`: what each worker's publisher may advertise; None: everything. `fleet_id`: publishers that were
        configured with a different id are ignored. A worker's record in the index is deleted after it has been closed for
        `delete_record_after_s`."""
        self._client = client
        self._index = index
        self._fleet = fleet
        self._owned = owned
        self._detector = detector
        self._doubt = doubt
        self._counters = counters
        self._identities = identities
        self._fleet_id = fleet_id
        self._log = RateLimitedLog(log)
        self._share = FairShare()
        self._clock = clock
        self._wakeup = Wakeup()
        self._adopt_at_s = clock() + ADOPT_EVERY_S
        self._ticked_s = clock()
        self._expiry = RecordExpiry(delete_record_after_s)
        self._present: set[str] = set()
        """Workers that are known not to be among the departures."""

    def adopt(self) -> None:
        """Also judge the workers of owned partitions that the fleet store knows, from the next round on. That round starts
        immediately."""
        self._adopt_at_s = self._clock()
        self._wakeup.wake()

    def watch_records(self, records: Iterable[WorkerRecord]) -> None:
        """Pass all current records of the owned shards. A worker with blocks in the index is then judged even if it is never
        heard from."""
        owned = [record for record in records if self._owned.owns(record.worker_id)]
        now_s = self._clock()
        self._detector.watch({record.worker_id for record in owned if _unretired(record)}, now_s)
        self._expiry.update(owned, now_s)

    def record_repair(self, worker_id: str, reason: str) -> None:
        """Note that a snapshot of this worker was requested. The worker's record shows it from the next round on."""
        self._detector.record_repair(worker_id, Repair(at_us=time_ns() // 1_000, reason=reason))

    async def listen(self) -> Subscription:
        """Receive heartbeats until the subscription is ended."""
        return await self._client.subscribe(ALL_ALIVE, cb=self._on_heartbeat)

    async def run(self) -> None:
        """Run until cancelled. If the store fails, the records are written in a later round."""
        subscription = await self.listen()
        try:
            while True:
                await self._wakeup.wait(WRITE_EVERY_S)
                try:
                    await self.tick()
                except (KvatlasError, RedisError) as error:
                    self._counters.store_errors += 1
                    log.warning("fleet records were not written (%s), retrying in %g s", error, WRITE_EVERY_S)
                    await anyio.sleep(WRITE_EVERY_S)
                await anyio.sleep(SHORTEST_PAUSE_S)
        finally:
            await unsubscribe(subscription, self._client)

    async def tick(self) -> None:
        """Run one round of adopting, judging, writing and retiring."""
        now_s = self._clock()
        if now_s - self._ticked_s > PAUSED_S:
            self._detector.skip_pause(now_s - self._ticked_s, now_s)
        self._ticked_s = now_s
        if now_s >= self._adopt_at_s:
            self._adopt_at_s = now_s + ADOPT_EVERY_S
            try:
                await self._adopt(now_s)
            except BaseException:
                self._adopt_at_s = now_s
                raise
        held_back = self._detector.held_back
        retirements = self._detector.detect(now_s)
        self._counters.workers_lost = self._detector.lost
        self._counters.retirements_held += max(0, self._detector.held_back - held_back)
        changed = self._detector.take_changed()
        try:
            await self._write(changed)
        except BaseException:
            self._detector.restore_changed(changed)
            raise
        self._counters.fleet_writes += len(changed)
        back = {id for id, record in changed.items() if record.liveness is Liveness.ALIVE} - self._present
        await self._fleet.forget_departures(back)
        self._present |= back
        self._counters.pools_repaired = self._fleet.pools_repaired
        # a replica that resumes after a pause first writes its old view, in which workers that are lost by now are still alive
        await self._fleet.update_existing(self._detector.lost_records())
        for retirement in retirements:
            await self._retire(retirement)
        for worker_id, incarnation in self._expiry.due(now_s):
            await self._index.forget(worker_id, incarnation)

    async def _write(self, changed: Mapping[str, FleetRecord]) -> None:
        """Write fleet records. A worker whose record can't be written is not judged until its next heartbeat."""
        try:
            await self._fleet.write(changed)
        except DATA_ERRORS:
            for worker_id, record in changed.items():
                try:
                    await self._fleet.write({worker_id: record})
                except DATA_ERRORS as error:
                    self._counters.records_bad += 1
                    self._detector.forget({worker_id}.__contains__)
                    line = f"worker {worker_id}: fleet record was not written: {type(error).__name__} {error}"
                    self._log.report(worker_id, line, logging.ERROR)

    async def _adopt(self, now_s: float) -> None:
        """Judge the workers that the fleet store lists but this replica does not judge yet. A record that is invalid, or is in
        a former pool of its worker, is removed; if the worker is alive, its next heartbeat writes it again."""
        entries = await self._fleet.entries(
            lambda worker_id, pool_id: self._owned.owns(worker_id) and self._detector.pool_of(worker_id) != pool_id
        )
        for worker_id, pool_id, record in entries:
            pool_now = self._detector.pool_of(worker_id)
            if not self._owned.owns(worker_id) or pool_now == pool_id:
                continue  # its partition has been released, or it has been heard from, in the meantime
            if pool_now is None and record is not None and self._refusal(record.endpoint) is None:
                self._detector.adopt({worker_id: record}, now_s)
            else:
                log.info("worker %s: removing its record from pool %s", worker_id, pool_id)
                await self._fleet.forget(worker_id, pool_id)

    async def _retire(self, retirement: Retirement) -> None:
        worker_id = retirement.worker_id
        record = await self._index.record(worker_id)
        if record is not None and _unretired(record) and not await self._index.retire(worker_id, record.incarnation):
            return  # it has begun another incarnation in the meantime
        if retirement.pool_id is not None:
            if (last := self._detector.lost_records().get(worker_id)) is not None:
                await self._fleet.record_departure(last)
            await self._fleet.forget(worker_id, retirement.pool_id)
        self._present.discard(worker_id)
        self._counters.workers_retired += 1
        log.info("worker %s: retired, no heartbeat", worker_id)
        self._owned.forget_worker(worker_id)

    async def _on_heartbeat(self, msg: Msg) -> None:
        worker_id = msg.subject.rsplit(".", 1)[-1]
        now_s = self._clock()
        self._detector.record_pulse(worker_id, now_s)
        if not self._owned.owns(worker_id):
            return
        if not self._share.admit(worker_id, now_s):
            self._counters.heartbeats_excess += 1
            self._log.report(f"flood {worker_id}", f"worker {worker_id}: too many heartbeats; reading a few a second")
            return
        now_us = time_ns() // 1_000
        try:
            beat = read_heartbeat(msg.data, worker_id, now_us)
        except InvalidValue as error:
            self._counters.heartbeats_bad += 1
            self._log.report(
                "invalid",
                f"invalid heartbeat on {msg.subject}: {error}; which process publishes there, in which version?",
            )
            return
        if beat.yielded:
            return  # another publisher speaks for it
        if beat.fleet_id is not None and self._fleet_id not in (None, beat.fleet_id):
            self._counters.heartbeats_refused += 1
            line = f"worker {worker_id} is ignored: its publisher is of fleet {beat.fleet_id}, this is fleet {self._fleet_id}"
            self._log.report(worker_id, f"{line}; give each fleet its own NATS (or account)")
            return
        if (refusal := self._refusal(beat.endpoint)) is not None:
            self._counters.heartbeats_refused += 1
            self._log.report(worker_id, f"heartbeat refused: {refusal}")
            return
        self._counters.heartbeats += 1
        if self._detector.pool_of(worker_id) not in (None, beat.endpoint.pool_id):
            self.adopt()  # it serves another model now, so its record in the former pool must go
        self._doubt.hear(worker_id, beat.incarnation, beat.acked_seq, now_s)
        if self._detector.hear(beat, now_s, now_us):
            self._wakeup.wake()

    def _refusal(self, endpoint: EngineEndpoint) -> str | None:
        """Why routers must not be given this endpoint; None if they may be."""
        try:
            if self._identities is not None:
                self._identities.check_endpoint(endpoint)
            elif address := endpoint.advertised_url or endpoint.base_url:
                check_origin(address)
        except InvalidValue as error:
            return str(error) if endpoint.id in str(error) else f"worker {endpoint.id}: {error}"
        return None


def _unretired(record: WorkerRecord) -> bool:
    """True if there is something to retire. A closed worker may still answer with the blocks of its last incarnation."""
    return record.answering or record.loading or not record.closed
