"""The ends of engines' answers that HTTP/1.1 allows, and those that it does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvatlas_router.upstream.engine_client import EngineLost
from kvatlas_router.upstream.engine_connection import MAX_BARE_BYTES, MAX_HEADERS, MOST_KEPT_BYTES, EngineConnection
from tests.eventually import until
from tests.router.upstream.nearby_engines import engine_client
from tests.router.upstream.test_engine_client import GOOD, Wire, engine, failure, post

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def script(*parts: bytes, closes: bool = True) -> AsyncIterator[int]:
    """The port of an engine that sends these parts, one at a time, whatever the request."""
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if not closes:
                await ended.wait()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        ended.set()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"3;x=y\r\none\r\n3\r\ntwo\r\n0\r\nx-trailer: z\r\n\r\n", b"onetwo"),
        (OK + b"content-length: 3\r\n\r\none", b"one"),
        (OK + b"content-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + GOOD, b"ok"),
    ],
)
async def test_an_answer_ends_as_its_head_says_and_the_connection_is_kept(answer: bytes, body: bytes) -> None:
    async with engine(lambda _, __: answer) as wire, engine_client() as client:
        for _ in range(2):
            assert await post(client, wire) == body
    assert wire.connections == [0, 0]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (GOOD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"ok"),
        (GOOD + b"unasked", b"ok"),
    ],
)
async def test_a_connection_that_says_no_more_after_an_answer_is_not_used_again(answer: bytes, body: bytes) -> None:
    async with script(answer) as port, engine_client() as client:
        for _ in range(2):
            assert await post(client, Wire(port)) == body


async def test_the_answer_to_a_head_request_has_no_body() -> None:
    async with engine(lambda _, __: OK + b"content-length: 9\r\n\r\n") as wire, engine_client() as client:
        for _ in range(2):
            assert await post(client, wire, b"", "HEAD") == b""
    assert wire.bodies == [b"", b""]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 600 What\r\ncontent-length: 0\r\n\r\n",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        OK + b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS + 1)) + b"\r\n",
        OK + b"x: " + b"y" * (2 * MAX_BARE_BYTES),
        b"HTTP/1.1 100 Continue\r\n\r\n" * (2 * MAX_BARE_BYTES // 25),
    ],
)
async def test_a_head_that_is_none_is_the_engines_failure(answer: bytes) -> None:
    async with script(answer, closes=False) as port, engine_client() as client:
        error = await failure(client.call("GET", f"http://127.0.0.1:{port}/"))
        assert error.connected and "no HTTP answer" in str(error)


@pytest.mark.parametrize(
    "rest", [b"zz\r\n", b"3\r\non", b"3\r\none\r\n0\r\nx: " + b"y" * (2 * MAX_BARE_BYTES), b"1" * 20 + b"\r\n"]
)
async def test_a_body_that_breaks_is_a_lost_engine(rest: bytes) -> None:
    async with script(CHUNKED, b"2\r\nok\r\n", rest) as port, engine_client() as client:
        answer = await client.send("GET", f"http://127.0.0.1:{port}/")
        with pytest.raises(EngineLost):
            await answer.read_all()
        answer.close()


async def test_a_silent_engine_is_given_up_and_not_asked_again() -> None:
    asked = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.read(65_536):
            asked += 1
            if asked == 1:
                writer.write(GOOD)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, engine_client(timeout_s=0.2) as client:
        assert (await client.call("GET", url)).status == 200
        error = await failure(client.call("GET", url))
        assert error.connected and "silent for 0.2 s" in str(error) and asked == 2


async def test_a_slow_reader_stops_the_engine_and_gets_all() -> None:
    body = b"x" * (20 * MOST_KEPT_BYTES)
    sent = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 65_536):
            writer.write(body[at : at + 65_536])
            await writer.drain()
        sent.set()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, engine_client() as client, client.answering("GET", url) as answer:
        for _ in range(200):
            await asyncio.sleep(0)
        assert not sent.is_set()
        assert await answer.read_all() == body


async def test_the_next_request_is_answered_after_a_long_answer_that_was_not_read() -> None:
    size = MOST_KEPT_BYTES + 1

    long = OK + b"content-length: %d\r\n\r\n" % size + b"x" * size
    async with engine(lambda _, __: long) as wire, engine_client(timeout_s=2) as client:
        async with client.answering("POST", f"http://127.0.0.1:{wire.port}/"):
            await until(lambda: all(one.done for one in client._open), what="the last byte, which stops the reading")
        assert len(await post(client, wire)) == size


@pytest.mark.parametrize("head", [b"", OK + b"content-length: 9\r\n\r\n"])
async def test_what_is_given_up_closes_the_connection(head: bytes) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        asked.set()
        with suppress(ConnectionResetError):  # the head was not read
            await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, engine_client() as client:
        task = asyncio.create_task(client.call("GET", url))
        await asyncio.wait_for(asked.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(gone.wait(), 60)


@pytest.mark.parametrize(
    "header", [(b"x-a", b"1\r\nx-b: 2"), (b"x-a\r\nx-b", b"2"), (b"x-a", b"1\nx-b: 2"), (b"x-a", b"\0")]
)
async def test_a_header_can_not_hide_another(header: tuple[bytes, bytes]) -> None:
    async with engine(lambda _, __: GOOD) as wire, engine_client() as client:
        assert not (await failure(client.send("GET", f"http://127.0.0.1:{wire.port}/", [header]))).connected
        assert not (await failure(client.send("GET", f"http://127.0.0.1:{wire.port}/a b"))).connected
    assert not wire.heads


async def test_a_client_that_is_closed_makes_no_cut_answer_look_whole() -> None:
    async with script(OK + b"\r\nthe beginning", closes=False) as port:
        async with engine_client() as client:
            answer = await client.send("GET", f"http://127.0.0.1:{port}/")
            assert await answer.read() == b"the beginning"
            rest = asyncio.create_task(answer.read())
            await asyncio.sleep(0)
        with pytest.raises(EngineLost, match="the router closed"):
            await rest


async def test_a_client_that_is_closed_does_not_ask_again() -> None:
    async with engine(lambda _, turn: b"" if turn else GOOD) as wire:
        async with engine_client() as client:
            assert await post(client, wire) == b"ok"
            second = asyncio.create_task(post(client, wire))
            await until(lambda: len(wire.bodies) == 2, what="the second request")
        assert "the router closed" in str(await failure(second))
    assert wire.connections == [0, 0]


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_a_call_that_is_cancelled_at_any_moment_leaves_no_connection_open() -> None:
    """Even at the moment when the connection has been made, but not yet handed on."""
    async with engine(lambda _, __: b"") as wire, engine_client() as client:
        for turns in range(24):
            call = asyncio.create_task(client.send("POST", f"http://127.0.0.1:{wire.port}/"))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait((call,))
            await until(
                lambda: not client._open, what=f"the end of a connection, cancelled after {turns} turns", deadline_s=5
            )


async def test_a_connection_that_closed_before_its_first_request_is_the_engines_failure() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    async with server:
        _, connection = await loop.create_connection(
            lambda: EngineConnection(set(), loop, 60), *server.sockets[0].getsockname()
        )
        await until(lambda: connection.closed, what="its end")
        connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", without_body=False)
        await asyncio.wait_for(connection.wait_for_head(), 5)
    assert connection.failure == "it closed the connection" and not connection.is_stale
