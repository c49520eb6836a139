"""Liveness over a real NATS and Valkey, with a clock that the test sets."""

from dataclasses import dataclass

import pytest
from nats.aio.client import Client

from indexer.counters import IndexerCounters
from indexer.liveness.heartbeats import ADOPT_EVERY_S, FORGET_AFTER_S, Heartbeats
from indexer.liveness.judge import LOST_AFTER_S, RETIRE_AFTER_S, LivenessJudge
from indexer.repair.doubt import DoubtJudge
from kvatlas.bus.subjects import alive_subject
from kvatlas.fleet.records import Liveness
from kvatlas.fleet.store import FleetStore, pool_workers_key
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.store.connection import Store
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusTeller, heartbeat
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """Heartbeats of one replica that owns everything; the test calls `tick` itself."""

    def __init__(self, client: Client, fleet: FleetStore) -> None:
        self.clock = Clock()
        self.index = MemoryIndex(partitions=PARTITIONS)
        self.counters = IndexerCounters()
        self.liveness = LivenessJudge()
        self.gone: list[str] = []
        self.heartbeats = Heartbeats(
            client=client,
            index=self.index,
            fleet=fleet,
            liveness=self.liveness,
            doubt=DoubtJudge(),
            counters=self.counters,
            owns=lambda _: True,
            on_gone=self._on_gone,
            clock=self.clock,
        )

    def _on_gone(self, worker_id: str) -> None:
        self.gone.append(worker_id)
        self.liveness.forget(lambda other: other == worker_id)

    async def later(self, seconds: float) -> None:
        """So much time passes, with a round each second."""
        while seconds > 0:
            self.clock.now_s += min(1.0, seconds)
            seconds -= 1.0
            await self.heartbeats.tick()

    async def hear(self, client: Client, worker: BusTeller) -> None:
        before = self.counters.heartbeats
        subscription = await self.heartbeats.listen()
        await worker.beat()
        await until(lambda: self.counters.heartbeats > before, what="the heartbeat is heard")
        await subscription.unsubscribe()


@pytest.fixture
def watched(client: Client, fleet: FleetStore) -> Watched:
    return Watched(client, fleet)


async def test_lost_then_retired(watched: Watched, client: Client, fleet: FleetStore) -> None:
    worker = BusTeller(client, "w0", incarnation=5)
    await apply_messages(watched.index, worker.begin(5))
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    assert (await fleet.all())["w0"].liveness is Liveness.ALIVE

    await watched.later(LOST_AFTER_S + 1)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    record = await watched.index.record("w0")
    assert record is not None and not record.closed

    await watched.later(RETIRE_AFTER_S)
    assert await fleet.all() == {}
    record = await watched.index.record("w0")
    assert record is not None and record.closed and not record.answering
    assert watched.gone == ["w0"]
    assert watched.counters.workers_retired == 1


async def test_workers_that_are_never_heard_by_the_new_owner_are_retired(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    before = Watched(client, fleet)
    worker = BusTeller(client, "w0")
    await before.hear(client, worker)
    await before.heartbeats.tick()

    watched.heartbeats.adopt()
    await watched.heartbeats.tick()
    await watched.later(RETIRE_AFTER_S)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    await watched.later(1)
    assert await fleet.all() == {}


async def test_a_heartbeat_on_anothers_subject_is_not_believed(watched: Watched, client: Client) -> None:
    subscription = await watched.heartbeats.listen()
    await client.publish(alive_subject("w1"), heartbeat(BusTeller(client, "w0")).pack())
    await client.publish(alive_subject("w1"), b"garbage")
    await until(lambda: watched.counters.heartbeats_bad == 2, what="both are refused")
    assert watched.liveness.workers == {}
    await subscription.unsubscribe()


async def test_a_worker_whose_last_snapshot_was_wrong_is_retired_too(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    """Its incarnation is closed, but what it told before still answers."""
    worker = BusTeller(client, "w0", incarnation=5)
    await apply_messages(watched.index, worker.begin(5), worker.store(SCOPE, b"12345678"))
    torn = worker.begin(6)
    torn[6][-1][2][1] += 1
    await apply_messages(watched.index, torn)
    record = await watched.index.record("w0")
    assert record is not None and record.closed and record.answering
    await watched.hear(client, worker)
    await watched.later(RETIRE_AFTER_S + 1)
    assert watched.gone == ["w0"]
    assert await watched.index.length() == 0


async def test_a_worker_of_which_only_late_messages_came_is_closed_and_forgotten(watched: Watched) -> None:
    worker = MessageSource("w0")
    worker.begin(5)
    await apply_messages(
        watched.index, worker.store(SCOPE, b"12345678")
    )  # its snapshot was lost, and it is never heard
    for seconds in (RETIRE_AFTER_S + 1, FORGET_AFTER_S + 1):
        watched.heartbeats.on_records(await watched.index.records(0))
        await watched.later(seconds)
        watched.heartbeats.on_records(await watched.index.records(0))
    await watched.later(FORGET_AFTER_S + 1)
    assert await watched.index.record("w0") is None


async def test_a_pool_without_workers_is_forgotten(watched: Watched, client: Client, fleet: FleetStore) -> None:
    worker = BusTeller(client, "w0")
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    assert len(await fleet.pools()) == 1
    await watched.later(RETIRE_AFTER_S + 1)
    assert await fleet.pools() == []


async def test_an_observer_that_stood_still_takes_its_own_sleep_for_nobodys_silence(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    worker = BusTeller(client, "w0", incarnation=5)
    await apply_messages(watched.index, worker.begin(5))
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    watched.clock.now_s += 10 * RETIRE_AFTER_S
    await watched.heartbeats.tick()
    assert (await fleet.all())["w0"].liveness is Liveness.ALIVE
    await watched.later(RETIRE_AFTER_S + 1)
    assert watched.gone == ["w0"]


async def test_what_a_replica_that_stood_still_writes_of_a_lost_worker_does_not_stay(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    worker = BusTeller(client, "w0", incarnation=5)
    await apply_messages(watched.index, worker.begin(5))
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    alive = await fleet.all()
    await watched.later(LOST_AFTER_S + 1)
    await fleet.write(alive)
    await watched.later(1)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST


async def test_a_record_of_a_retired_worker_that_comes_back_is_forgotten_again(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    """A failover of the store, or a replica that stood still, brings it back: nobody is heard, nobody judges it."""
    worker = BusTeller(client, "w0")
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    alive = await fleet.all()
    await watched.later(RETIRE_AFTER_S + 1)
    assert await fleet.all() == {}
    await fleet.write(alive)
    await watched.later(ADOPT_EVERY_S + LOST_AFTER_S + 2)
    assert (await fleet.all())["w0"].liveness is Liveness.LOST
    await watched.later(RETIRE_AFTER_S)
    assert await fleet.all() == {}


async def test_a_record_that_cant_be_understood_is_taken_out_and_stops_nothing(
    watched: Watched, client: Client, store: Store, fleet: FleetStore
) -> None:
    worker = BusTeller(client, "w0")
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    [pool_id] = await fleet.pools()
    await store.client.hset(pool_workers_key(pool_id), "w1", b"garbage")
    watched.heartbeats.adopt()
    await watched.heartbeats.tick()
    assert set(await fleet.all()) == {"w0"}


async def test_a_worker_that_serves_another_model_leaves_the_pool_of_the_first(
    watched: Watched, client: Client, fleet: FleetStore
) -> None:
    worker = BusTeller(client, "w0")
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    [before] = await fleet.pools()
    other = heartbeat(worker)
    other = other.model_copy(update={"endpoint": other.endpoint.model_copy(update={"model_id": "other"})})
    subscription = await watched.heartbeats.listen()
    heard = watched.counters.heartbeats
    await client.publish(alive_subject("w0"), other.pack())
    await until(lambda: watched.counters.heartbeats > heard, what="it is heard")
    await subscription.unsubscribe()
    await watched.heartbeats.tick()
    assert await fleet.pool(before) == {}
    assert await fleet.pools() == [other.endpoint.pool_id]
    assert (await fleet.all())["w0"].endpoint.model_id == "other"
