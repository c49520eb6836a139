"""A second layout is filled while the first one answers; then the second one answers, and the first is deleted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from nats.aio.client import Client

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import events_subject
from kvatlas.errors import InvalidValue
from kvatlas.index.redis.answering_index import AnsweringIndex, open_answering_index
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, connected_store
from kvatlas_cli.layouts import answer_with, delete, read_states
from tests.eventually import until
from tests.indexer.bus_publisher import SCOPE, BusPublisher, has_applied_all, indexed, published
from tests.indexer.running_replica import answering_requests, running_replica

pytestmark = pytest.mark.anyio

BLOCKS = 6


class CountingPublisher(BusPublisher):
    """A publisher whose number of partitions can be changed, as by a restart with another `--partitions`."""

    partitions = 64

    @property
    def subject(self) -> str:
        return events_subject(self.worker_id, self.partitions)


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_valkey, wait=False) as opened:
        yield opened


@pytest.fixture
async def nats_client(fresh_nats: str) -> AsyncIterator[Client]:
    client = await connect_nats(fresh_nats, name="test", wait=False)
    yield client
    await client.close()


class Watch:
    """Keeps asking a router's index for what every worker certainly holds."""

    def __init__(self, index: AnsweringIndex, publishers: list[CountingPublisher]) -> None:
        self._index = index
        self._certain = {one.worker_id: b"".join(sorted(key for _, key in one.held)) for one in publishers}
        self.asked = 0

    async def run(self) -> None:
        """Ask until cancelled. Raises AssertionError for a wrong or incomplete answer."""
        while True:
            for worker_id, hashes in self._certain.items():
                found = await self._index.overlap(SCOPE, hashes)
                assert found.depths() == {worker_id: len(hashes) // HASH_BYTES}, f"after {self.asked} questions"
                self.asked += 1
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def fleet(client: Client, nats_url: str, store: Store) -> AsyncIterator[list[CountingPublisher]]:
    """Publishers with blocks, which a replica has applied."""
    publishers = [CountingPublisher(client, f"w{number}") for number in range(5)]
    async with running_replica(nats_url, store.url), answering_requests(client, publishers):
        for publisher in publishers:
            await publisher.start()
            await publisher.store_more(BLOCKS)
        index = await open_redis_index(store, writer=False)
        await until(lambda: has_applied_all(index, *publishers), what="all is applied")
        yield publishers


async def test_a_switch_under_load_has_no_gap_and_no_wrong_answer(
    nats_client: Client, fresh_nats: str, store: Store
) -> None:
    other = {"layout": 1, "partitions": 24, "shards": 4, "member_id": "b"}
    async with anyio.create_task_group() as tasks:
        async with fleet(nats_client, fresh_nats, store) as publishers:
            router = await open_answering_index(store)
            watch = Watch(router, publishers)
            tasks.start_soon(watch.run)

            async def publish() -> None:
                while True:
                    for publisher in publishers:
                        await publisher.store_more(1)
                    await anyio.sleep(0.01)

            tasks.start_soon(publish)
            tasks.start_soon(run_replica, fresh_nats, store.url, other)
            await until(lambda: has_layout(store, 1), what="the second layout has an indexer")
            await answer_with(store, 1, 60)
            await until(lambda: router._index.layout.number == 1, what="the router reads the new layout")
            asked = watch.asked
            await until(lambda: watch.asked > asked + 20, what="the router goes on")
            with pytest.raises(InvalidValue, match="1 indexer of layout 0 still running; stop all of them first"):
                await delete(store, 0)
        tasks.cancel_scope.cancel()


async def has_layout(store: Store, number: int) -> bool:
    return any(state.layout.number == number and state.indexers for state in await read_states(store))


async def run_replica(nats_url: str, redis_url: str, settings: dict[str, object]) -> None:
    """Run a replica until cancelled."""
    async with running_replica(nats_url, redis_url, **settings):
        await anyio.sleep_forever()


async def test_the_layout_left_behind_is_deleted_and_publishers_change_their_partitions_later(
    nats_client: Client, fresh_nats: str, store: Store
) -> None:
    other = {"layout": 1, "partitions": 24, "shards": 4, "member_id": "b"}
    async with anyio.create_task_group() as tasks:
        async with fleet(nats_client, fresh_nats, store) as publishers:
            tasks.start_soon(run_replica, fresh_nats, store.url, other)
            await until(lambda: has_layout(store, 1), what="the second layout has an indexer")
            await answer_with(store, 1, 60)
        async with answering_requests(nats_client, publishers):
            await delete(store, 0)
            assert [key async for key in store.client.scan_iter(match="kva:{s[0-9]}:*")] == []
            publishers[0].partitions = 24
            for publisher in publishers:
                await publisher.store_more(BLOCKS)
            index = await open_redis_index(store, writer=False)
            assert (index.partitions, index.shards) == (24, 4)
            await until(lambda: has_applied_all(index, *publishers), what="all is applied")
            assert await indexed(index, *publishers) == published(*publishers)
            (state,) = await read_states(store)
            assert (state.answers, state.indexers, state.workers) == (True, 1, len(publishers))

            await store.client.flushall()
            await until(lambda: has_applied_all(index, *publishers), deadline_s=60, what="all is there again")
            assert [one.layout.number for one in await read_states(store)] == [1]
        tasks.cancel_scope.cancel()


async def test_a_layout_that_nobody_fills_does_not_answer(nats_client: Client, fresh_nats: str, store: Store) -> None:
    async with fleet(nats_client, fresh_nats, store):
        with pytest.raises(InvalidValue, match="it has no layout 1; start `kvatlas indexer --layout 1` first"):
            await answer_with(store, 1, 1)
        await open_redis_index(store, number=1, shards=2, writer=True)
        with pytest.raises(InvalidValue, match="layout 1 has no indexer; start `kvatlas indexer --layout 1` first"):
            await answer_with(store, 1, 1)
        with pytest.raises(InvalidValue, match="layout 0 answers; let another one answer first"):
            await delete(store, 0)
