from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store, connected_store

STREAM = StreamSettings(storage="memory", max_bytes=256 << 20)


@pytest.fixture
async def nats() -> AsyncIterator[EmbeddedServer]:
    """A NATS server for one test, which may stop it."""
    async with nats_server() as server:
        yield server


@pytest.fixture
async def nats_client(nats: EmbeddedServer) -> AsyncIterator[Client]:
    """A connection to it; the event stream exists."""
    connected = await connect_nats(nats.url, name="test", wait=False)
    try:
        await ensure_stream(connected, STREAM)
        yield connected
    finally:
        await connected.close()


@pytest.fixture
async def valkey() -> AsyncIterator[EmbeddedServer]:
    """A Valkey server for one test."""
    async with valkey_server() as server:
        yield server


@pytest.fixture
async def store(valkey: EmbeddedServer) -> AsyncIterator[Store]:
    async with connected_store(valkey.url, wait=False) as opened:
        yield opened


@pytest.fixture
def fleet(store: Store) -> FleetStore:
    return FleetStore(store)
