"""Calls to engines as sent over the wire, and the errors for engines that do not answer."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient, EngineLost, EngineUnreachable
from kvatlas_router.upstream.engine_connection import WHOLE_BYTES
from tests.eventually import until
from tests.router.upstream.nearby_engines import engine_client

pytestmark = pytest.mark.anyio

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-One: a\r\nx-one: b\r\n\r\nok"

WORK_S = 0.5
"""Longer than it takes to notice a closed connection."""


@dataclass(slots=True)
class Wire:
    """Everything that an engine was sent: heads and bodies in order, and the connection of each, counted from 0."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)


Manners = Callable[[Wire, int], bytes | None]
"""The answer to the last request, given its number on the connection, from 0; None: close the connection."""


@asynccontextmanager
async def engine(manners: Manners, host: str = "127.0.0.1") -> AsyncIterator[Wire]:
    wire, count = Wire(), 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        try:
            for turn in range(1_000):
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                wire.bodies.append(await reader.readexactly(int(length[0].partition(b":")[2])) if length else b"")
                wire.heads.append(head)
                wire.connections.append(number)
                answer = manners(wire, turn)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, 0)
    wire.port = server.sockets[0].getsockname()[1]
    async with server:
        yield wire


def good(_: Wire, __: int) -> bytes:
    return GOOD


def closes_kept_connections(_: Wire, turn: int) -> bytes | None:
    return None if turn else GOOD


async def post(client: EngineClient, wire: Wire, body: bytes = b"x", method: str = "POST") -> bytes:
    async with client.answering(method, f"http://127.0.0.1:{wire.port}/v1/x", body=body) as answer:
        return await answer.read_all()


async def failure(call: Awaitable[object]) -> EngineUnreachable:
    with pytest.raises(EngineUnreachable) as raised:
        await call
    return raised.value


async def test_a_request_is_sent_as_it_is_given() -> None:
    headers = [(b"accept", b"*/*"), (b"X-Two", b"a"), (b"x-two", "Grüße".encode())]
    async with engine(good) as wire, engine_client() as client:
        url = f"http://127.0.0.1:{wire.port}/v1/a%2Fb%20c;d?q=%2B+x&q=1"
        async with client.answering("PATCH", url, headers, b"body") as answer:
            assert answer.status == 200 and await answer.read_all() == b"ok"
            assert [pair for pair in answer.headers if pair[0].lower() == b"x-one"] == [
                (b"X-One", b"a"),
                (b"x-one", b"b"),
            ]
    (head,) = wire.heads
    first, *lines = head.decode().strip().split("\r\n")
    assert first == "PATCH /v1/a%2Fb%20c;d?q=%2B+x&q=1 HTTP/1.1" and wire.bodies == [b"body"]
    assert {line.lower() for line in lines} == {
        f"host: 127.0.0.1:{wire.port}",
        "accept: */*",
        "x-two: a",
        "x-two: grüße",
        "content-length: 4",
    }


@pytest.mark.parametrize("size", [WHOLE_BYTES - 1, WHOLE_BYTES, 3 << 20])
async def test_large_bodies_arrive_whole(size: int) -> None:
    async with engine(good) as wire, engine_client() as client:
        assert await post(client, wire, b"x" * size) == b"ok"
    assert len(wire.bodies[0]) == size


async def test_connections_are_used_again() -> None:
    async with engine(good) as wire, engine_client() as client:
        for _ in range(3):
            assert await post(client, wire) == b"ok"
    assert wire.connections == [0, 0, 0]


async def test_a_kept_connection_that_closes_without_a_byte_is_tried_once_more_on_a_new_one() -> None:
    async with engine(closes_kept_connections) as wire, engine_client() as client:
        for _ in range(3):
            assert await post(client, wire) == b"ok"
    assert wire.connections == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_request_is_never_tried_a_third_time(method: str) -> None:
    def bad_request(wire: Wire, _: int) -> bytes | None:
        return None if wire.bodies[-1] == b"bad" else GOOD

    async with engine(bad_request) as wire, engine_client() as client:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):  # several connections that are kept
                tasks.create_task(post(client, wire))
        assert (await failure(post(client, wire, b"bad", method))).connected
    assert wire.bodies.count(b"bad") == 2


async def test_a_request_that_the_engine_worked_on_before_it_closed_is_not_sent_again() -> None:
    asked = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(GOOD)
        await reader.readuntil(b"\r\n\r\nx")
        asked += 1
        await asyncio.sleep(WORK_S)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    wire = Wire(server.sockets[0].getsockname()[1])
    async with server, engine_client() as client:
        assert await post(client, wire) == b"ok"
        assert (await failure(post(client, wire))).connected and asked == 1


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_new_connection_that_closes_without_a_byte_is_the_engines_failure(method: str) -> None:
    async with engine(lambda _, __: None) as wire, engine_client() as client:
        assert (await failure(post(client, wire, method=method))).connected
    assert wire.connections == [0]


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\n", GOOD.partition(b"\r\n\r\n")[0]])
async def test_an_answer_that_has_begun_is_not_asked_for_again(part: bytes) -> None:
    cut = False

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cut
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(GOOD)
        await reader.readuntil(b"\r\n\r\nx")
        cut = True
        writer.write(part)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    wire = Wire(server.sockets[0].getsockname()[1])
    async with server, engine_client() as client:
        assert await post(client, wire) == b"ok"
        assert (await failure(post(client, wire))).connected and cut


async def test_a_cut_answer_is_a_lost_engine() -> None:
    short = GOOD.replace(b": 2", b": 3")
    async with engine(lambda _, __: short) as wire, engine_client(timeout_s=0.5) as client:
        answer = await client.send("POST", f"http://127.0.0.1:{wire.port}/")
        assert await answer.read() == b"ok"
        with pytest.raises(EngineLost):
            await answer.read()
        answer.close()


async def test_what_is_not_http_is_the_engines_failure() -> None:
    async with engine(lambda _, __: b"SSH-2.0-x\r\n\r\n") as wire, engine_client() as client:
        error = await failure(post(client, wire))
        assert error.connected and "no HTTP answer" in str(error)


async def test_nothing_listens_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with engine_client() as client:
            error = await failure(client.call("GET", f"http://127.0.0.1:{taken.getsockname()[1]}/health"))
    assert not error.connected and "refused" in str(error)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_an_address_that_is_not_allowed_is_not_connected_to(host: str) -> None:
    async with engine(good) as wire, EngineClient(AddressPolicy(near=False), timeout_s=5) as client:
        error = await failure(client.call("GET", f"http://{host}:{wire.port}/health"))
        assert f"{host}:{wire.port} is not an allowed engine address" in str(error) and not error.connected
        assert not wire.heads


@pytest.mark.parametrize(
    "url", ["http://", "ftp://127.0.0.1:1/", "http://[::1/", "http://127.1:1/", "http://no-such.invalid/"]
)
async def test_what_is_no_address_of_an_engine_is_not_connected_to(url: str) -> None:
    async with engine_client() as client:
        assert not (await failure(client.call("GET", url))).connected


@pytest.mark.parametrize("addresses", [("::1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "::1")])
async def test_every_address_of_a_name_is_tried(addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's names have one address each, so a name with two is added to what the system resolves."""
    resolve = socket.getaddrinfo

    def with_two(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        named = addresses if host == "engine.test" else (host,)
        return [info for one in named for info in resolve(one, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", with_two)
    async with engine(good) as wire, engine_client() as client:
        assert (await client.call("GET", f"http://engine.test:{wire.port}/")).status == 200
    assert f"host: engine.test:{wire.port}".encode() in wire.heads[0].lower()


async def test_of_a_names_addresses_only_the_allowed_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def with_two(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        named = ("127.0.0.1", "127.0.0.3") if host == "engine.test" else (host,)
        return [info for one in named for info in resolve(one, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", with_two)
    policy = AddressPolicy(("127.0.0.3",), near=True)
    async with engine(good) as wire, EngineClient(policy, timeout_s=5) as client:
        assert not (await failure(client.call("GET", f"http://engine.test:{wire.port}/"))).connected
    assert not wire.heads


async def test_requests_to_one_name_share_a_lookup_that_outlives_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, looked_up, may_answer = socket.getaddrinfo, 0, threading.Event()

    def slowly(host: Any, *args: Any, **options: Any) -> Any:
        nonlocal looked_up
        if host == "engine.test":
            looked_up += 1
            may_answer.wait(60)
            host = "127.0.0.1"
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    async with engine(good) as wire, engine_client(connect_s=60) as client:
        calls = [asyncio.create_task(client.call("GET", f"http://engine.test:{wire.port}/")) for _ in range(20)]
        try:
            await until(lambda: looked_up, what="the lookup")
            calls[0].cancel()
            await asyncio.wait(calls[:1])
        finally:
            may_answer.set()
        replies = await asyncio.gather(*calls[1:])
    assert {reply.status for reply in replies} == {200} and calls[0].cancelled() and looked_up == 1


async def test_a_name_that_was_not_found_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, found = socket.getaddrinfo, False

    def later(host: Any, *args: Any, **options: Any) -> Any:
        if host == "engine.test" and not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    async with engine(good) as wire, engine_client() as client:
        url = f"http://engine.test:{wire.port}/"
        for error in await asyncio.gather(*(failure(client.call("GET", url)) for _ in range(3))):
            assert "not known" in str(error) and not error.connected
        found = True
        assert (await client.call("GET", url)).status == 200
