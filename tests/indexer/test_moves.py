"""Moves to another store, which separate indexers fill while the current one serves."""

from functools import partial

import pytest
from nats.aio.client import Client

from kvatlas.embedded import EmbeddedServer
from kvatlas.fleet.records import Liveness
from kvatlas.fleet_store.fleet_identity import read_store_identity
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, connected_store
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher, has_applied_all, indexed, published
from tests.indexer.running_replica import answering_requests, running_replica

pytestmark = pytest.mark.anyio


async def test_two_stores_hold_the_same_until_the_first_is_left(
    nats_client: Client, nats: EmbeddedServer, fresh_valkey: str, redis8_url: str
) -> None:
    publishers = [BusPublisher(nats_client, f"w{number}") for number in range(4)]
    async with (
        connected_store(fresh_valkey, wait=False) as first,
        connected_store(redis8_url, wait=False) as second,
    ):
        await second.client.flushall()

        async def are_exact(*stores: Store) -> None:
            for store in stores:
                index = await open_redis_index(store, writer=False)
                await until(partial(has_applied_all, index, *publishers), what="all is applied")
                assert await indexed(index, *publishers) == published(*publishers)

        async with running_replica(nats.url, fresh_valkey, member_id="a"):
            identity = await read_store_identity(first)
            assert identity is not None
            for publisher in publishers:
                await publisher.start()
                await publisher.store_more()
            await are_exact(first)
            async with (
                answering_requests(nats_client, publishers),
                running_replica(nats.url, redis8_url, member_id="b", shards=2, fleet_id=identity.fleet),
            ):
                await are_exact(first, second)
                for publisher in publishers:
                    await publisher.store_more()
                await are_exact(first, second)
                fleet = await until(FleetStore(second).all, what="the fleet is there, too")
                assert {record.liveness for record in fleet.values()} == {Liveness.ALIVE}
        async with running_replica(nats.url, redis8_url, member_id="b"):
            for publisher in publishers:
                await publisher.store_more()
            await are_exact(second)
