"""Liveness over a real NATS and Valkey, with a clock that the test sets."""

from dataclasses import dataclass

import pytest
from nats.aio.client import Client

from indexer.counters import IndexerCounters
from indexer.doubt import DoubtJudge
from indexer.heartbeats import FORGET_AFTER_S, Heartbeats
from indexer.liveness import LOST_AFTER_S, RETIRE_AFTER_S, LivenessJudge
from kvatlas.fleet import Liveness
from kvatlas.fleet_store import FleetStore
from kvatlas.index.memory import MemoryIndex
from kvatlas.subjects import alive_subject
from tests.index.telling import Teller, tell
from tests.indexer.bus_teller import PARTITIONS, SCOPE, BusTeller, heartbeat
from tests.waiting import until

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
    await tell(watched.index, worker.begin(5))
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
    await tell(watched.index, worker.begin(5), worker.store(SCOPE, b"12345678"))
    torn = worker.begin(6)
    torn[6][-1][2][1] += 1
    await tell(watched.index, torn)
    record = await watched.index.record("w0")
    assert record is not None and record.closed and record.answering
    await watched.hear(client, worker)
    await watched.later(RETIRE_AFTER_S + 1)
    assert watched.gone == ["w0"]
    assert await watched.index.length() == 0


async def test_a_worker_of_which_only_late_messages_came_is_closed_and_forgotten(watched: Watched) -> None:
    worker = Teller("w0")
    worker.begin(5)
    await tell(watched.index, worker.store(SCOPE, b"12345678"))  # its snapshot was lost, and it is never heard
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
    await tell(watched.index, worker.begin(5))
    await watched.hear(client, worker)
    await watched.heartbeats.tick()
    watched.clock.now_s += 10 * RETIRE_AFTER_S
    await watched.heartbeats.tick()
    assert (await fleet.all())["w0"].liveness is Liveness.ALIVE
    await watched.later(RETIRE_AFTER_S + 1)
    assert watched.gone == ["w0"]
