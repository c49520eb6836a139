"""A connection to a NATS server with an empty stream."""

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream


@pytest.fixture
async def nats_client(fresh_nats: str) -> AsyncIterator[Client]:
    client = await connect_nats(fresh_nats, name="test")
    await ensure_stream(client, StreamSettings(storage="memory"))
    yield client
    await client.close()
