"""Two fleets on one NATS: the second fleet's indexers and publishers are refused, and both sides log why."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_fleet
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.errors import OtherFleet
from kvatlas.fleet_store.fleet_identity import read_store_identity
from kvatlas.store.connection import Store, connected_store
from kvatlas_indexer.ownership.fleet_guard import FleetGuard
from kvatlas_publishers.fleet_check import FleetCheck
from tests.eventually import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def two_stores_on_one_nats() -> AsyncIterator[tuple[Client, Store, Store]]:
    async with (
        nats_server() as nats,
        valkey_server() as one,
        valkey_server() as other,
        connected_store(one.url) as first,
        connected_store(other.url) as second,
    ):
        client = await connect_nats(nats.url, name="test", wait=False)
        await ensure_stream(client, StreamSettings(storage="memory", max_bytes=1 << 20))
        yield client, first, second
        await client.close()


async def test_the_id_is_made_once_and_kept_in_store_and_stream() -> None:
    async with two_stores_on_one_nats() as (client, store, _):
        made = await FleetGuard(client, store, "a", "NATS").join()
        assert (await FleetGuard(client, store, "b", "NATS").join()).fleet == made.fleet == await stream_fleet(client)


async def test_an_empty_store_is_refused_while_the_fleet_keeps_another_unless_it_joins_on_purpose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with two_stores_on_one_nats() as (client, store, empty), anyio.create_task_group() as tasks:
        first = FleetGuard(client, store, "a", "NATS")
        fleet = (await first.join()).fleet
        tasks.start_soon(first.run)

        async def is_refused() -> bool:
            try:
                await FleetGuard(client, empty, "b", "NATS").join()
            except OtherFleet as error:
                return f"NATS belongs to fleet {fleet}: its indexer a uses the store" in str(error)
            await empty.client.flushall()  # the first one was not listening yet
            return False

        await until(is_refused, what="the second is refused")
        assert "indexer b of another fleet" in caplog.text and await read_store_identity(empty) is None
        assert (await FleetGuard(client, empty, "b", "NATS", fleet).join()).fleet == fleet
        tasks.cancel_scope.cancel()


async def test_a_store_that_lost_everything_goes_on_as_the_same_fleet() -> None:
    async with two_stores_on_one_nats() as (client, store, _):
        fleet = (await FleetGuard(client, store, "a", "NATS").join()).fleet
        await store.client.flushall()
        assert (await FleetGuard(client, store, "a", "NATS").join()).fleet == fleet


async def test_stores_of_two_fleets_are_refused_even_if_nobody_is_there() -> None:
    async with two_stores_on_one_nats() as (client, store, other):
        await FleetGuard(client, other, "b", "NATS").join()
        await client.jetstream().delete_stream("KVATLAS_EVENTS")
        await ensure_stream(client, StreamSettings(storage="memory", max_bytes=1 << 20))
        await FleetGuard(client, store, "a", "NATS").join()
        with pytest.raises(OtherFleet, match="and .* to fleet"):
            await FleetGuard(client, other, "b", "NATS").join()


async def test_an_indexer_with_a_fleet_id_makes_that_fleet_and_refuses_others() -> None:
    async with two_stores_on_one_nats() as (client, store, other):
        made = await FleetGuard(client, store, "a", "NATS", "00000000000a").join()
        assert made.fleet == "00000000000a" == await stream_fleet(client)
        for one in (store, other):
            with pytest.raises(OtherFleet, match="NATS is of fleet 00000000000a; expected fleet 00000000000b"):
                await FleetGuard(client, one, "b", "NATS", "00000000000b").join()
        assert await read_store_identity(other) is None


async def test_a_publisher_of_another_fleet_is_refused_and_learns_nothing_of_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with two_stores_on_one_nats() as (client, store, _), anyio.create_task_group() as tasks:
        await FleetCheck(
            client, "00000000000b", "w0", "NATS"
        ).ask()  # there is no indexer, so nothing would take its workers
        guard = FleetGuard(client, store, "a", "NATS", "00000000000a")
        await guard.join()
        tasks.start_soon(guard.run)

        line = "^NATS is of fleet 00000000000a .indexer a.; expected fleet 00000000000b, as --fleet-id says; give each fleet"
        with anyio.fail_after(30), pytest.raises(OtherFleet, match=line) as refused:
            await FleetCheck(client, "00000000000b", "w0, w1", "NATS", every_s=0.01).run()
        assert store.name not in str(refused.value)
        assert "a publisher of another fleet, 00000000000b, uses this NATS, for w0, w1" in caplog.text
        await FleetCheck(client, "00000000000a", "w2", "NATS").ask()
        tasks.cancel_scope.cancel()
