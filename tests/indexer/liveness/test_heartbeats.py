"""Liveness over a real NATS and Valkey, with a clock that the test sets."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import alive_subject
from kvatlas.bus.wire import END_DIGEST, EVENTS
from kvatlas.fleet.records import FleetRecord, ForwardPassMetrics, Liveness, WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore, pool_workers_key
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.store.connection import Store
from kvatlas.validation import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.liveness.failure_detector import LOST_AFTER_S, RETIRE_AFTER_S, FailureDetector
from kvatlas_indexer.liveness.heartbeats import ADOPT_EVERY_S, DELETE_RECORD_AFTER_S, Heartbeats
from kvatlas_indexer.liveness.suspicion import DoubtJudge
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from kvatlas_indexer.ownership.owned_partitions import WorkerState as ForgettingState
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusPublisher, heartbeat
from tests.indexer.idle_readers import owned_partitions
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio


FLEET = "00000000000a"


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class ClockedHeartbeats:
    """Heartbeats of a replica; the test sets the clock and calls `tick`."""

    def __init__(
        self, nats_client: Client, fleet: FleetStore, owned: OwnedPartitions, detector: FailureDetector
    ) -> None:
        self.clock = Clock()
        self.index = MemoryIndex(partitions=PARTITIONS)
        self.counters = IndexerCounters()
        self.detector = detector
        self.heartbeats = Heartbeats(
            client=nats_client,
            index=self.index,
            fleet=fleet,
            owned=owned,
            detector=detector,
            doubt=DoubtJudge(),
            counters=self.counters,
            fleet_id=FLEET,
            clock=self.clock,
        )

    async def later(self, seconds: float) -> None:
        """Let time pass, with a round each second."""
        while seconds > 0:
            self.clock.now_s += min(1.0, seconds)
            seconds -= 1.0
            await self.heartbeats.tick()

    async def hear(self, nats_client: Client, worker: BusPublisher) -> None:
        before = self.counters.heartbeats
        subscription = await self.heartbeats.listen()
        await worker.beat()
        await until(lambda: self.counters.heartbeats > before, what="the heartbeat is heard")
        await subscription.unsubscribe()


class Forgotten:
    """Records which of the workers w0 and w1 were forgotten."""

    def __init__(self) -> None:
        self.workers: list[str] = []

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        self.workers += [worker_id for worker_id in ("w0", "w1") if is_gone(worker_id)]


MORE_KV_THAN_64_BITS_OF_TOKENS = [
    {name: (1 << 64) // MAX_BLOCK_TOKENS} for name in ("active_kv_blocks", "total_kv_blocks")
]
"""With the largest blocks."""


@pytest.fixture
def forgotten() -> Forgotten:
    return Forgotten()


@asynccontextmanager
async def replica_of_all(
    nats_client: Client, fleet: FleetStore, *worker_states: ForgettingState
) -> AsyncIterator[ClockedHeartbeats]:
    """Heartbeats of a replica that owns every partition."""
    detector = FailureDetector()
    async with owned_partitions(*range(PARTITIONS), worker_states=[detector, *worker_states]) as owned:
        yield ClockedHeartbeats(nats_client, fleet, owned, detector)


@pytest.fixture
async def replica(nats_client: Client, fleet: FleetStore, forgotten: Forgotten) -> AsyncIterator[ClockedHeartbeats]:
    async with replica_of_all(nats_client, fleet, forgotten) as made:
        yield made


async def test_a_worker_of_another_fleet_is_ignored(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = BusPublisher(nats_client, "w0"), BusPublisher(nats_client, "w1")
    subscription = await replica.heartbeats.listen()
    await nats_client.publish(
        alive_subject("w1"), heartbeat(other).model_copy(update={"fleet_id": "00000000000b"}).pack()
    )
    await nats_client.publish(alive_subject("w0"), heartbeat(own).model_copy(update={"fleet_id": FLEET}).pack())
    await until(lambda: replica.counters.heartbeats == 1, what="the own worker is heard")
    await subscription.unsubscribe()
    await replica.heartbeats.tick()
    assert set(await fleet.all()) == {"w0"} and replica.counters.heartbeats_refused == 1
    assert "worker w1 is ignored: its publisher is of fleet 00000000000b, this is fleet 00000000000a" in caplog.text


async def test_a_heartbeat_with_impossible_values_is_refused_by_name(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = BusPublisher(nats_client, "w0"), BusPublisher(nats_client, "w1")
    beat = heartbeat(bad).model_dump(mode="json")
    for wrong in (
        {**beat, "endpoint": {**beat["endpoint"], "block_size": (1 << 53) - 1}},
        {**beat, "endpoint": {**beat["endpoint"], "block_size": MAX_BLOCK_TOKENS + 1}},
        {**beat, "endpoint": {**beat["endpoint"], "block_bytes": MAX_BLOCK_BYTES + 1}},
        *({**beat, "load": {"id": "w1", "forward_pass": blocks}} for blocks in MORE_KV_THAN_64_BITS_OF_TOKENS),
        {**beat, "endpoint": {**beat["endpoint"], "id": "w0"}},
        {**beat, "incarnation": (1 << 64) - 1},
        {**beat, "load": {"id": "w0"}},
        {**beat, "endpoint": {**beat["endpoint"], "labels": {str(i): "" for i in range(1_000)}}},
    ):
        before = replica.counters.heartbeats_bad
        subscription = await replica.heartbeats.listen()
        await nats_client.publish(alive_subject("w1"), msgpack.packb(wrong))
        await until(lambda: replica.counters.heartbeats_bad > before, what="the heartbeat is refused")  # noqa: B023
        await subscription.unsubscribe()
    assert "invalid heartbeat on kvatlas.alive.w1: Heartbeat field endpoint.block_size is" in caplog.text
    await replica.hear(nats_client, good)
    await replica.heartbeats.tick()
    assert set(await fleet.all()) == {"w0"}


async def test_a_fleet_record_that_can_not_be_written_is_its_workers_alone(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    """No border lets such a record in; if one did, the replica and the other workers would continue."""
    good, bad = heartbeat(BusPublisher(nats_client, "w0")), heartbeat(BusPublisher(nats_client, "w1"))
    load = WorkerState.model_construct(id="w1", queued_prefill_tokens=1 << 70, forward_pass=ForwardPassMetrics())
    for beat in (good, bad.model_copy(update={"load": load})):
        replica.detector.hear(beat, replica.clock.now_s, 1)
    await replica.heartbeats.tick()
    assert set(await fleet.all()) == {"w0"} and replica.counters.records_bad == 1
    await replica.heartbeats.tick()


async def test_an_unreadable_fleet_record_hides_no_other_worker(
    fleet: FleetStore, nats_client: Client, store: Store
) -> None:
    beat = heartbeat(BusPublisher(nats_client, "w0"))
    record = FleetRecord(endpoint=beat.endpoint, state=beat.state, liveness=Liveness.ALIVE)
    await fleet.load_functions()
    await fleet.write({"w0": record})
    refused: list[str] = []
    reader = FleetStore(store, on_refused=lambda worker_id, _: refused.append(worker_id))
    key = pool_workers_key(record.endpoint.pool_id)
    for name, packed in ((b"w1", b"garbage"), (b"w2", record.pack()), (b"\xff", b"")):
        await store.client.hset(key, name, packed)
    assert set(await reader.all()) == {"w0"}
    assert refused == ["w1", "w2", "\\xff"]


async def test_a_silent_worker_is_lost_then_retired(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore, forgotten: Forgotten
) -> None:
    worker = BusPublisher(nats_client, "w0", incarnation=5)
    await apply_messages(replica.index, worker.begin(5))
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    assert (await fleet.all())["w0"].liveness is Liveness.ALIVE

    await replica.later(LOST_AFTER_S + 1)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    record = await replica.index.record("w0")
    assert record is not None and not record.closed

    await replica.later(RETIRE_AFTER_S)
    assert await fleet.all() == {}
    record = await replica.index.record("w0")
    assert record is not None and record.closed and not record.answering
    assert forgotten.workers == ["w0"]
    assert replica.counters.workers_retired == 1


async def test_workers_that_are_never_heard_by_the_new_owner_are_retired(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    worker = BusPublisher(nats_client, "w0")
    async with replica_of_all(nats_client, fleet) as last_owner:
        await last_owner.hear(nats_client, worker)
        await last_owner.heartbeats.tick()

    replica.heartbeats.adopt()
    await replica.heartbeats.tick()
    await replica.later(RETIRE_AFTER_S)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    await replica.later(1)
    assert await fleet.all() == {}


async def test_a_heartbeat_on_another_workers_subject_is_refused(
    replica: ClockedHeartbeats, nats_client: Client
) -> None:
    subscription = await replica.heartbeats.listen()
    await nats_client.publish(alive_subject("w1"), heartbeat(BusPublisher(nats_client, "w0")).pack())
    await nats_client.publish(alive_subject("w1"), b"garbage")
    await until(lambda: replica.counters.heartbeats_bad == 2, what="both are refused")
    assert replica.detector.workers == {}
    await subscription.unsubscribe()


async def test_a_closed_worker_that_still_answers_is_retired_too(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore, forgotten: Forgotten
) -> None:
    """Its last snapshot was wrong, so the previous incarnation's blocks still answer."""
    worker = BusPublisher(nats_client, "w0", incarnation=5)
    await apply_messages(replica.index, worker.begin(5), worker.store(SCOPE, b"12345678"))
    wrong = worker.begin(6)
    wrong[EVENTS][-1][END_DIGEST][1] += 1
    await apply_messages(replica.index, wrong)
    record = await replica.index.record("w0")
    assert record is not None and record.closed and record.answering
    await replica.hear(nats_client, worker)
    await replica.later(RETIRE_AFTER_S + 1)
    assert forgotten.workers == ["w0"]
    assert await replica.index.length() == 0


async def test_the_record_of_a_worker_with_only_late_messages_is_closed_and_deleted(replica: ClockedHeartbeats) -> None:
    worker = MessageSource("w0")
    worker.begin(5)
    await apply_messages(
        replica.index, worker.store(SCOPE, b"12345678")
    )  # its snapshot was lost, and it sends no heartbeat
    for seconds in (RETIRE_AFTER_S + 1, DELETE_RECORD_AFTER_S + 1):
        replica.heartbeats.watch_records(await replica.index.records(0))
        await replica.later(seconds)
        replica.heartbeats.watch_records(await replica.index.records(0))
    await replica.later(DELETE_RECORD_AFTER_S + 1)
    assert await replica.index.record("w0") is None


async def test_a_pool_without_workers_is_deleted(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    worker = BusPublisher(nats_client, "w0")
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    assert len(await fleet.pools()) == 1
    await replica.later(RETIRE_AFTER_S + 1)
    assert await fleet.pools() == []


async def test_a_replica_that_stood_still_counts_no_silence_for_that_time(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore, forgotten: Forgotten
) -> None:
    worker = BusPublisher(nats_client, "w0", incarnation=5)
    await apply_messages(replica.index, worker.begin(5))
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    replica.clock.now_s += 10 * RETIRE_AFTER_S
    await replica.heartbeats.tick()
    assert (await fleet.all())["w0"].liveness is Liveness.ALIVE
    await replica.later(RETIRE_AFTER_S + 1)
    assert forgotten.workers == ["w0"]


async def test_a_fleet_record_that_a_paused_replica_wrote_of_a_lost_worker_is_corrected(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    worker = BusPublisher(nats_client, "w0", incarnation=5)
    await apply_messages(replica.index, worker.begin(5))
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    alive = await fleet.all()
    await replica.later(LOST_AFTER_S + 1)
    await fleet.write(alive)
    await replica.later(1)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST


async def test_a_fleet_record_of_a_retired_worker_that_comes_back_is_deleted_again(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    """A failover of the store, or a paused replica, brings it back, but no heartbeat comes, and no replica judges it."""
    worker = BusPublisher(nats_client, "w0")
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    alive = await fleet.all()
    await replica.later(RETIRE_AFTER_S + 1)
    assert await fleet.all() == {}
    await fleet.write(alive)
    await replica.later(ADOPT_EVERY_S + LOST_AFTER_S + 2)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    await replica.later(RETIRE_AFTER_S)
    assert await fleet.all() == {}


async def test_an_invalid_fleet_record_is_removed_and_stops_nothing(
    replica: ClockedHeartbeats, nats_client: Client, store: Store, fleet: FleetStore
) -> None:
    worker = BusPublisher(nats_client, "w0")
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    [pool_id] = await fleet.pools()
    await store.client.hset(pool_workers_key(pool_id), "w1", b"garbage")
    replica.heartbeats.adopt()
    await replica.heartbeats.tick()
    assert set(await fleet.all()) == {"w0"}


async def test_a_worker_that_serves_another_model_leaves_its_former_pool(
    replica: ClockedHeartbeats, nats_client: Client, fleet: FleetStore
) -> None:
    worker = BusPublisher(nats_client, "w0")
    await replica.hear(nats_client, worker)
    await replica.heartbeats.tick()
    [before] = await fleet.pools()
    other = heartbeat(worker)
    other = other.model_copy(update={"endpoint": other.endpoint.model_copy(update={"model_id": "other"})})
    subscription = await replica.heartbeats.listen()
    heard = replica.counters.heartbeats
    await nats_client.publish(alive_subject("w0"), other.pack())
    await until(lambda: replica.counters.heartbeats > heard, what="the heartbeat is heard")
    await subscription.unsubscribe()
    await replica.heartbeats.tick()
    assert await fleet.pool(before) == {}
    assert await fleet.pools() == [other.endpoint.pool_id]
    assert (await fleet.all())["w0"].endpoint.model_id == "other"
