"""Connections to a real NATS server: one that goes away, and ones that fail."""

import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import nats_server
from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.errors import AccessDenied, Unreachable
from kvatlas.runtime.descriptors import count_descriptors
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


async def test_a_refused_connection_leaves_no_descriptor() -> None:
    async with nats_server(user="fleet", password="right") as server, no_descriptor_left():
        for _ in range(3):
            with pytest.raises(AccessDenied):
                await connect_nats(f"nats://fleet:wrong@{LOOPBACK}:{server.port}", name="test", wait=False)


async def test_a_connection_that_is_never_answered_leaves_no_descriptor() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        async with no_descriptor_left():
            with pytest.raises(Unreachable):
                await connect_nats(f"nats://{LOOPBACK}:{silent.getsockname()[1]}", name="test", wait=False)


@asynccontextmanager
async def no_descriptor_left() -> AsyncIterator[None]:
    """Check that the block closes what it opens. The garbage collector, which would close it sooner or later, is off."""
    before = count_descriptors()
    gc.disable()
    try:
        yield
        await until(lambda: count_descriptors() == before, what="all descriptors are closed")
    finally:
        gc.enable()
