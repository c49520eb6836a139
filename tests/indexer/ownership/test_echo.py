"""A message's round trip through NATS."""

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import EmbeddedServer, nats_server
from kvatlas_indexer.ownership.echo import Echo
from tests.eventually import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with nats_server() as server:
        yield server


@pytest.fixture
async def nats_client(server: EmbeddedServer) -> AsyncIterator[Client]:
    client = await connect_nats(server.url, name="test")
    yield client
    await client.close()


async def test_each_check_gets_its_echo(nats_client: Client) -> None:
    echo = Echo(nats_client)
    await echo.start()
    for _ in range(3):
        await echo.check(5)
    await echo.stop()


async def test_a_paused_server_gives_no_echo_until_it_is_resumed(server: EmbeddedServer, nats_client: Client) -> None:
    echo = Echo(nats_client)
    await echo.start()
    await echo.check(5)
    server.pause()
    with pytest.raises(TimeoutError, match="no echo"):
        await echo.check(0.1)
    server.resume()
    await echo.check(5)


async def test_without_a_connection_there_is_no_echo(server: EmbeddedServer, nats_client: Client) -> None:
    echo = Echo(nats_client)
    await echo.start()
    await server.kill()
    await until(lambda: not nats_client.is_connected, what="the connection is gone")
    with pytest.raises(TimeoutError, match="not connected"):
        await echo.check(5)


async def test_a_client_receives_messages_after_a_flush_that_was_answered_too_late(
    server: EmbeddedServer, nats_client: Client
) -> None:
    received: list[object] = []

    async def receive(msg: object) -> None:
        received.append(msg)

    await nats_client.subscribe("subject", cb=receive)
    await nats_client.flush()
    server.pause()
    with pytest.raises(FlushTimeoutError):
        await nats_client.flush(timeout=1)
    server.resume()
    await nats_client.publish("subject", b"")
    await until(lambda: received, what="the message is received")
    assert nats_client.stats["reconnects"] == 0
