"""A local copy next to a running indexer, on real servers that are killed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.errors import Unreachable
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.local_copy.local_copy import IndexReplica, ReplicaState, open_replica
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.mark_lookup import SEGMENT
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import connected_store
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher
from tests.indexer.running_replica import answering_requests, running_replica

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
LENGTH = 100
CHAIN = extend_chain(range(4 * LENGTH), 4)
KEYS = [CHAIN[at : at + HASH_BYTES] for at in range(0, len(CHAIN), HASH_BYTES)]
PLACES = {key: (KEYS[i - i % SEGMENT], i % SEGMENT) for i, key in enumerate(KEYS)}
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _frequent_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.index.local_copy.local_copy.CHECK_S", 0.2)


@dataclass
class World:
    """Servers, an indexer, a replica of the index, and two workers, one of them a hybrid."""

    nats: EmbeddedServer
    valkey: EmbeddedServer
    client: Client
    index: RedisIndex
    replica: IndexReplica
    workers: list[BusPublisher]

    async def is_exact(self) -> bool:
        """True if the replica answers with what the workers hold, as the store does."""
        if self.replica.state is not ReplicaState.CURRENT:
            return False
        try:
            here, there = await self.replica.overlap(SCOPE, CHAIN), await self.index.overlap(SCOPE, CHAIN)
        except Unreachable:  # a store that was killed
            return False
        held = {worker.worker_id: sum((SCOPE, key) in worker.held for key in KEYS) for worker in self.workers}
        return (
            here.source.startswith("replica")
            and here.runs_by_worker() == there.runs_by_worker()
            and here.reach() == there.reach()
            and here.depths() == {id: depth for id, depth in held.items() if depth}
        )

    async def becomes_exact(self) -> None:
        await until(self.is_exact, deadline_s=DEADLINE_S, what=f"the replica is exact: {self.replica.status()}")


@asynccontextmanager
async def world(**settings: float) -> AsyncIterator[World]:
    async with (
        nats_server() as nats,
        valkey_server() as valkey,
        running_replica(nats.url, valkey.url, stream_storage="file"),
        connected_store(valkey.url, wait=False) as store,
    ):
        client = await connect_nats(nats.url, name="test", wait=False)
        index = await open_redis_index(store, writer=True)
        hybrid = BusPublisher(client, "hybrid")
        hybrid.dropped, hybrid.places = 0, PLACES
        workers = [BusPublisher(client, "plain"), hybrid]
        try:
            async with answering_requests(client, workers):
                for worker in workers:
                    await worker.start()
                    await worker.send(worker.store(SCOPE, CHAIN[: 8 * 70]))
                await hybrid.send(hybrid.mark(SCOPE, [KEYS[40], KEYS[66]]))
                chosen = ReplicaSettings(nats.url, **{"max_stale_ms": 5_000.0, **settings})  # type: ignore[arg-type]
                async with open_replica(store, AnsweringIndex(store, index), chosen) as replica:
                    yield World(nats, valkey, client, index, replica, workers)
        finally:
            await client.close()


async def test_a_replica_answers_as_the_store_does_and_follows_the_stream_and_the_store() -> None:
    async with world() as here:
        await here.becomes_exact()
        plain, hybrid = here.workers
        await plain.send(plain.store(SCOPE, CHAIN[8 * 70 :], parent=KEYS[69]))
        await hybrid.send(hybrid.mark(SCOPE, [KEYS[66]], unmark=True))
        await plain.send(plain.remove(SCOPE, CHAIN[8 * 90 :]))
        await here.becomes_exact()
        assert (await here.replica.overlap(SCOPE, CHAIN)).reach() == {"hybrid": 41}
        await plain.start(plain.incarnation + 1)
        await here.becomes_exact()
        # not shown by any message: the store closes a worker, and then asks it for a snapshot
        await here.index.retire("plain", plain.incarnation)
        await here.becomes_exact()
        assert (here.replica.counters.loads, here.replica.counters.mismatches) == (1, 0)
        assert here.replica.counters.verified > 0


async def test_a_replica_that_missed_a_change_is_made_again() -> None:
    async with world() as here:
        await here.becomes_exact()
        plain, _ = here.workers
        await here.index.put(ScopeUse(SCOPE, 4), "plain", Tier.HBM, CHAIN[8 * 70 : 8 * 80])  # past the stream
        plain.seq += 1
        for key in KEYS[70:80]:
            plain.held[SCOPE, key] = {Tier.HBM}
        await here.becomes_exact()
        assert here.replica.counters.loads == 2


async def test_the_store_answers_while_nats_is_away_and_the_replica_once_it_is_back() -> None:
    async with world(max_stale_ms=1_000) as here:
        await here.becomes_exact()
        here.nats.pause()
        await until(lambda: here.replica.state is ReplicaState.STALE, deadline_s=DEADLINE_S, what="it is stale")
        found = await here.replica.overlap(SCOPE, CHAIN)
        assert found.source == "store, while the replica is stale" and found.depths() == {"plain": 70, "hybrid": 70}
        assert here.replica.counters.while_stale == 1
        here.nats.resume()
        await here.becomes_exact()
        await here.nats.kill()
        await here.nats.start()
        await until(
            lambda: here.client.is_connected and here.client.stats["reconnects"] > 0,
            deadline_s=DEADLINE_S,
            what="the publishers are connected again",
        )
        await here.workers[0].send(here.workers[0].store(SCOPE, CHAIN[8 * 70 :], parent=KEYS[69]))
        await here.becomes_exact()


async def test_a_replica_of_a_store_that_is_wiped_is_exact_again() -> None:
    async with world() as here:
        await here.becomes_exact()
        async with connected_store(here.valkey.url, wait=False) as store:
            await store.client.flushall()
        await until(
            lambda: here.index.record("plain"), deadline_s=DEADLINE_S, what="the workers are in the store again"
        )
        await here.becomes_exact()
        await here.valkey.kill()
        assert (await here.replica.overlap(SCOPE, CHAIN)).depths() == {"plain": 70, "hybrid": 70}  # without the store
        await here.valkey.start()
        await here.workers[0].send(here.workers[0].store(SCOPE, CHAIN[8 * 70 :], parent=KEYS[69]))
        await here.becomes_exact()


async def test_a_copy_above_its_memory_is_not_made() -> None:
    async with world(max_bytes=1_000) as here:
        await until(lambda: here.replica.state is ReplicaState.TOO_LARGE, deadline_s=DEADLINE_S, what="it is too large")
        found = await here.replica.overlap(SCOPE, CHAIN)
        assert found.source == "store, while the replica is too large" and found.depths()["plain"] == 70
        assert "0 MiB or more" in here.replica.status()["why"]


async def test_nats_and_the_copy_are_not_waited_for(fresh_valkey: str) -> None:
    async with connected_store(fresh_valkey, wait=False) as store:
        index = await open_redis_index(store, writer=True)
        await index.put(ScopeUse(SCOPE, 4), "w", Tier.HBM, CHAIN)
        with anyio.fail_after(60):
            async with open_replica(
                store, AnsweringIndex(store, index), ReplicaSettings("nats://127.0.0.1:1")
            ) as replica:
                found = await replica.overlap(SCOPE, CHAIN)
                assert found.source == "store, while the replica is loading" and found.depths() == {"w": LENGTH}
