"""The proof that a replica and NATS hear each other."""

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from indexer.ownership.echo import Echo
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import EmbeddedServer, nats_server
from tests.eventually import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with nats_server() as server:
        yield server


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[Client]:
    client = await connect_nats(server.url, name="test")
    yield client
    await client.close()


async def test_an_echo_comes_back_again_and_again(client: Client) -> None:
    echo = Echo(client)
    await echo.start()
    for _ in range(3):
        await echo.check(5)
    await echo.stop()


async def test_no_echo_from_a_server_that_stands_still_and_one_when_it_goes_on(
    server: EmbeddedServer, client: Client
) -> None:
    echo = Echo(client)
    await echo.start()
    await echo.check(5)
    server.pause()
    with pytest.raises(TimeoutError, match="no echo"):
        await echo.check(0.1)
    server.resume()
    await echo.check(5)


async def test_no_echo_without_a_connection(server: EmbeddedServer, client: Client) -> None:
    echo = Echo(client)
    await echo.start()
    await server.kill()
    await until(lambda: not client.is_connected, what="the connection is gone")
    with pytest.raises(TimeoutError, match="not connected"):
        await echo.check(5)


async def test_a_client_hears_on_after_a_flush_that_was_answered_too_late(
    server: EmbeddedServer, client: Client
) -> None:
    heard: list[bytes] = []

    async def hear(msg: object) -> None:
        heard.append(b"")

    await client.subscribe("subject", cb=hear)
    await client.flush()
    server.pause()
    with pytest.raises(FlushTimeoutError):
        await client.flush(timeout=1)
    server.resume()
    await client.publish("subject", b"")
    await until(lambda: heard, what="the message is heard")
    assert client.stats["reconnects"] == 0
