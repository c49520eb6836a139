"""Connections to a real NATS server that goes away."""

import pytest

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import nats_server
from kvatlas.embedded.free_port import LOOPBACK
from tests.chaos.proxy import TcpProxy
from tests.eventually import until

pytestmark = pytest.mark.anyio


async def test_a_connection_with_waiting_messages_closes_while_nats_is_away() -> None:
    """While disconnected, nats-py keeps what is published."""
    # the proxy keeps the port: the client would connect to another server that took it
    async with nats_server() as server, TcpProxy(server.port, "NATS") as line:
        client = await connect_nats(f"nats://{LOOPBACK}:{line.port}", name="test")
        line.cut()
        await until(lambda: not client.is_connected, what="the client has noticed")
        await client.publish("subject", b"payload")
        assert client.pending_data_size
        await client.close()
        assert client.is_closed
