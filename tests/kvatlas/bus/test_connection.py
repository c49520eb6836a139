"""Connections to a real NATS server that goes away."""

import pytest

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import nats_server
from tests.eventually import until

pytestmark = pytest.mark.anyio


async def test_a_connection_with_waiting_messages_closes_while_nats_is_away() -> None:
    """Between two connections nats-py keeps what is published."""
    async with nats_server() as server:
        client = await connect_nats(server.url, name="test")
        await server.kill()
        await until(lambda: not client.is_connected, what="the client has noticed")
        await client.publish("subject", b"payload")
        assert client.pending_data_size
        await client.close()
        assert client.is_closed
