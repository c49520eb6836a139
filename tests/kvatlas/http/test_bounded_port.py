"""A port that passes connections on to a server, up to the number of places."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from anyio.abc import SocketStream

from kvatlas.http.access import HttpAccess
from kvatlas.http.bounded_port import BoundedPort
from kvatlas.http.server import listen
from tests.eventually import until
from tests.kvatlas.http.listener import read_to_end

pytestmark = pytest.mark.anyio


@dataclass
class Echo:
    """A server that sends everything back, and remembers its clients' names."""

    names: list[str] = field(default_factory=list)
    ended: int = 0
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.names.append(f"unix-abstract:{writer.get_extra_info('peername')[1:].decode()}")
        try:
            while data := await reader.read(65_536):
                await self.reads.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def bounded(access: HttpAccess) -> AsyncIterator[tuple[BoundedPort, Echo, int]]:
    listener = listen("127.0.0.1", 0, "the test", access)
    port, echo = BoundedPort(listener), Echo()
    echo.reads.set()
    name = "\0" + port.server_address.removeprefix("unix-abstract:")
    async with await asyncio.start_unix_server(echo.serve, name):
        await port.start()
        try:
            yield port, echo, listener.socket.getsockname()[1]
        finally:
            await port.stop()


@asynccontextmanager
async def connected(port: int, own: str) -> AsyncIterator[SocketStream]:
    async with await anyio.connect_tcp("127.0.0.1", port, local_host=own) as stream:
        yield stream


async def receive_exactly(stream: SocketStream, size: int) -> bytes:
    received = b""
    with anyio.fail_after(60):
        while len(received) < size:
            received += await stream.receive()
    return received


async def test_what_is_sent_arrives_however_slowly_it_is_read() -> None:
    sent = bytes(range(256)) * 40_000
    async with bounded(HttpAccess()) as (port, echo, at), connected(at, "127.0.0.3") as stream:
        echo.reads.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.send, sent)
            await until(lambda: echo.names, what="the server has the connection")
            assert port.address_of(echo.names[0]) == "127.0.0.3" and port.address_of("unix:") == ""
            echo.reads.set()
            assert await receive_exactly(stream, len(sent)) == sent
        await stream.aclose()
        await until(lambda: port.address_of(echo.names[0]) == "", what="its name is forgotten")


async def test_only_connections_with_a_place_reach_the_server() -> None:
    async with bounded(HttpAccess(connections=4, address_connections=3)) as (port, echo, at), AsyncExitStack() as stack:
        first = [await stack.enter_async_context(connected(at, "127.0.0.2")) for _ in range(3)]
        async with connected(at, "127.0.0.2") as refused:
            assert await read_to_end(refused) == b""
        other = await stack.enter_async_context(connected(at, "127.0.0.3"))
        async with connected(at, "127.0.0.4") as refused:
            assert await read_to_end(refused) == b""
        for stream in (*first, other):
            await stream.send(b"x")
            assert await receive_exactly(stream, 1) == b"x"
        assert port.counters.too_many == 2 and len(echo.names) == 4
        await first[0].aclose()
        await until(lambda: echo.ended == 1, what="the server's end is closed")
        again = await stack.enter_async_context(connected(at, "127.0.0.2"))
        await again.send(b"x")
        assert await receive_exactly(again, 1) == b"x"
        await port.stop()
        for stream in (*first[1:], other, again):
            assert await read_to_end(stream) == b""
        await until(lambda: echo.ended == 5, what="every end is closed")


async def test_without_a_server_a_connection_is_closed() -> None:
    listener = listen("127.0.0.1", 0, "the test", HttpAccess(connections=1))
    port = BoundedPort(listener)
    await port.start()
    for _ in range(3):
        async with connected(listener.socket.getsockname()[1], "127.0.0.2") as stream:
            assert await read_to_end(stream) == b""
    assert port.counters.too_many == 0
    await port.stop()
