"""What an HTTP server takes for a request, and where it takes it to end, over real sockets, as clients of every kind send
it."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvatlas.http.access import HttpAccess
from kvatlas.http.bounded_protocol import BoundedProtocol
from kvatlas.http.guard import ON_LEAVE
from tests.kvatlas.http.listener import APPLICATION, ASK, LAST, answers_in, connected, read_to_end, serving

pytestmark = pytest.mark.anyio

UPGRADE = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
SMUGGLED = b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n\n\r\n\n"
CHUNKED = b"%x\r\n%b\r\n0\r\nhost: y\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
MEBIBYTE = 1 << 20


class Slow:
    """An application whose answer to /slow begins at once and ends when it is allowed to."""

    def __init__(self) -> None:
        self.may_end, self.disconnected = anyio.Event(), anyio.Event()
        self.routed = Starlette(routes=[Route("/slow", self._slow), *APPLICATION.routes])

    async def _slow(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                yield b"one "
                await self.may_end.wait()
                yield b"two"
            except anyio.get_cancelled_exc_class():
                self.disconnected.set()
                raise

        return StreamingResponse(parts())


async def test_a_request_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        lengths = b"content-length: 4\r\ntransfer-encoding: chunked\r\n"
        await stream.send(
            b"POST / HTTP/1.1\r\nhost: x\r\n" + lengths + b"\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
        assert b"Transfer-Encoding can't be present with Content-Length" in answer


@pytest.mark.parametrize("hosts", [b"", b"host: x\r\nhost: y\r\n"])
async def test_a_request_has_one_host(hosts: bytes) -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"GET / HTTP/1.1\r\n" + hosts + b"\r\n")
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"expected one" in answer


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with serving(HttpAccess()) as listener:
        for path, body in ((b"/stream", b"one two"), (b"/", b"0")):
            async with connected(listener) as stream:
                await stream.send(b"GET " + path + b" HTTP/1.0\r\n\r\n")
                head, _, rest = (await read_to_end(stream)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head and rest == body


async def test_what_follows_a_request_does_not_take_its_answer() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(ASK + b"no request\r\n\r\n")
        answers = (await read_to_end(stream)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"400"]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5, 6, 7, 1_000])
async def test_every_request_has_its_own_body_however_it_is_cut(at_once: int) -> None:
    """Even if it asks for another protocol, as those of Java clients and of `curl --http2`."""
    length = b"content-length: %d\r\n\r\n" % len(SMUGGLED)
    requests = [ASK, UPGRADE + length + SMUGGLED, UPGRADE + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED]
    requests += [UPGRADE + b"\r\n", UPGRADE + b"content-length: 0\r\n\r\n"]
    requests += [request.replace(b"upgrade: ", b"x-no: ") for request in requests]
    sent = b"".join(requests) + LAST
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        for start in range(0, len(sent), at_once):
            await stream.send(sent[start : start + at_once])
        whole = str(len(SMUGGLED)).encode()
        bodies = [body for _, body in answers_in(await read_to_end(stream))]
        assert bodies == [b"0", whole, whole, b"0", b"0"] * 2 + [b"0"]


async def test_a_body_that_comes_after_the_headers_of_an_upgrade_is_no_request() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(UPGRADE + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED))
        assert (await stream.receive()).startswith(b"HTTP/1.1 100 ")
        await stream.send(SMUGGLED + LAST)
        answers = answers_in(await read_to_end(stream))
        assert answers == [(200, str(len(SMUGGLED)).encode()), (200, b"0")]


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"GET / HTTP/1.1\r\nx-a: " + b"a" * 70_000, 431),
        (LAST, 200),
    ],
)
async def test_an_answer_is_complete_whatever_follows_its_request(second: bytes, status: int) -> None:
    slow = Slow()
    async with serving(HttpAccess(), application=slow.routed) as listener, connected(listener) as stream:
        await stream.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        received = await stream.receive()
        await stream.send(second)
        async with connected(listener) as other:  # its answer shows that the server has read what was sent before
            await other.send(LAST)
            await read_to_end(other)
        slow.may_end.set()
        first, last = answers_in(received + await read_to_end(stream))
        assert first == (200, b"one two") and last[0] == status


async def test_a_client_that_leaves_ends_its_request_even_with_another_one_waiting() -> None:
    slow = Slow()
    async with serving(HttpAccess(), application=slow.routed) as listener:
        async with connected(listener) as stream:
            await stream.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + ASK)
            await stream.receive()
        with anyio.fail_after(60):
            await slow.disconnected.wait()


class Reader:
    """An application that reads each body to its end, and then waits until its client disconnects."""

    def __init__(self) -> None:
        self.read, self.left = anyio.Event(), anyio.Event()
        self.routed = Starlette(routes=[Route("/", self)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ON_LEAVE](self.left.set)
        while (await receive()).get("more_body", False):
            pass
        self.read.set()
        await self.left.wait()


@pytest.mark.parametrize("parts", [1, 2, 5])
async def test_the_departure_of_a_client_with_a_long_body_is_noticed(parts: int) -> None:
    reader, part = Reader(), b"a" * (200_000 // parts)
    async with serving(HttpAccess(), application=reader.routed) as listener:
        with anyio.fail_after(60):
            async with connected(listener) as stream:
                await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (parts * len(part)))
                for _ in range(parts):
                    await stream.send(part)
                await reader.read.wait()
            await reader.left.wait()


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET /\r\n", b"version is 0.9"),
        (b"GET / HTTP/2.0\r\n", b"version is 2.0"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n", b"expected chunked"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", b"gzip"),
    ],
)
async def test_other_versions_and_codings_are_refused(head: bytes, why: bytes) -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(head + b"\r\n" + LAST)
        ((status, body),) = answers_in(await read_to_end(stream))
        assert status == 400 and why in body


async def test_nothing_is_read_after_a_connect() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n" + ASK)
        assert [status for status, _ in answers_in(await read_to_end(stream))] == [404]


@pytest.mark.parametrize(
    ("before", "body", "length"),
    [
        (b"", b"%x\r\n%b\r\n" % (MEBIBYTE, b"\r\n\r\n" * (MEBIBYTE // 4)), MEBIBYTE),
        (b"", b"%x\r\n%b\r\n" % (MEBIBYTE, b"\n0\r\n\r\n\r\n" * (MEBIBYTE // 8)), MEBIBYTE),
        (b"", b"4;a=b\r\n\r\n\r\n\r\n" * (MEBIBYTE // 16), MEBIBYTE // 4),
        (b"\r\n" * 30_000, b"", 0),
    ],
)
async def test_no_client_chooses_how_often_the_parser_is_called(
    before: bytes, body: bytes, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"parts of a body": 0, "parser": 0, "segments": 0}

    def count(kind: type[Any], method: str, name: str) -> None:
        original = getattr(kind, method)

        def counted(self: Any, data: bytes) -> None:
            calls[name] += 1
            original(self, data)

        monkeypatch.setattr(kind, method, counted)

    count(HttpToolsProtocol, "on_body", "parts of a body")
    count(HttpToolsProtocol, "data_received", "parser")
    count(BoundedProtocol, "data_received", "segments")
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        await stream.send(before + head + body + b"0\r\nhost: y\r\n\r\n" + LAST)
        assert [found for _, found in answers_in(await read_to_end(stream))] == [b"%d" % length, b"0"]
    ends = 4  # of: lines before a request, its head, its body, the last request
    assert calls["parts of a body"] <= calls["parser"] <= calls["segments"] + ends


async def test_a_target_with_a_host_is_its_path() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        for target in (b"http://x:1/healthz", b"HTTP://x", b"ftp://x/healthz"):
            await stream.send(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        await stream.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = (await read_to_end(stream)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"200", b"404", b"200"]


async def test_what_is_not_http_is_an_answer_in_json_and_few_lines_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(HttpAccess()) as listener:
        for _ in range(5):
            async with connected(listener) as stream:
                await stream.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
                answer = await read_to_end(stream)
                assert answer.startswith(b"HTTP/1.1 400 ") and b"this is not HTTP/1.1" in answer
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("request of 127.0.0.1 refused: this is not HTTP/1.1")


async def test_a_zeromq_socket_gets_no_answer_that_it_could_take_for_messages() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
        assert await read_to_end(stream) == b""


async def test_a_websocket_is_refused_clearly_and_other_upgrades_are_left_alone() -> None:
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\n\r\n"
    async with serving(HttpAccess()) as listener:
        async with connected(listener) as stream:
            await stream.send(upgrade % b"WebSocket")
            answer = await read_to_end(stream)
            assert answer.startswith(b"HTTP/1.1 400 ") and b"WebSockets are not supported" in answer
        async with connected(listener) as stream:
            await stream.send(upgrade % b"h2c")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
