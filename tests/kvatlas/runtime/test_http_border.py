"""What an HTTP server refuses: over real sockets, as clients of every kind would send it."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trustme
from anyio.abc import SocketStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvatlas.errors import SettingsError
from kvatlas.runtime.bounded_protocol import BoundedProtocol
from kvatlas.runtime.connection_shares import RESERVE
from kvatlas.runtime.http_access import HttpAccess
from kvatlas.runtime.http_server import Listener, listen, serve
from kvatlas.settings import IndexerSettings, ProxySettings, PublishSettings
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

LIMIT = 1_000
UNFINISHED = b"GET / HTTP/1.1\r\nx-a: b\r\n"
UNFINISHED_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123456789"
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def _echo_length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def _stream(_: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    return StreamingResponse(parts())


APPLICATION = Starlette(
    routes=[
        Route("/", _echo_length, methods=["GET", "POST", "OPTIONS"]),
        Route("/healthz", _echo_length),
        Route("/stream", _stream),
    ]
)


class Slow:
    """An application whose answer to /slow begins at once and ends when it may."""

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


@asynccontextmanager
async def serving(
    access: HttpAccess, grace_s: int = 0, application: Starlette = APPLICATION
) -> AsyncIterator[Listener]:
    listener = listen("127.0.0.1", 0, "the test", access)
    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, grace_s=grace_s), application, listener)
        yield listener
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(listener: Listener, own: str | None = None) -> AsyncIterator[SocketStream]:
    """`own`: the client's address."""
    async with await anyio.connect_tcp(*listener.socket.getsockname(), local_host=own) as stream:
        yield stream


async def read_to_end(stream: SocketStream) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with anyio.fail_after(60):
        try:
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return answer


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


def answers_in(received: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer; the parts of a chunked body in one."""
    found = []
    for answer in received.split(b"HTTP/1.1 ")[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        parts = body.split(b"\r\n")[1::2] if b"transfer-encoding: chunked" in head else [body]
        found.append((int(head[:3]), b"".join(parts)))
    return found


UPGRADE = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SMUGGLED = b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n\n\r\n\n"
CHUNKED = b"%x\r\n%b\r\n0\r\nhost: y\r\n\r\n" % (len(SMUGGLED), SMUGGLED)


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
        async with connected(listener) as other:  # by its answer the server has read what was sent before
            await other.send(LAST)
            await read_to_end(other)
        slow.may_end.set()
        first, last = answers_in(received + await read_to_end(stream))
        assert first == (200, b"one two") and last[0] == status


async def test_a_client_that_leaves_ends_its_request_even_with_another_one_behind() -> None:
    slow = Slow()
    async with serving(HttpAccess(), application=slow.routed) as listener:
        async with connected(listener) as stream:
            await stream.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + ASK)
            await stream.receive()
        with anyio.fail_after(60):
            await slow.disconnected.wait()


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


async def test_nothing_is_read_behind_a_connect() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n" + ASK)
        assert [status for status, _ in answers_in(await read_to_end(stream))] == [404]


@pytest.mark.parametrize("endless", [b"0\r\nx-a: ", b"0;x="])
async def test_trailers_and_extensions_are_bounded(endless: bytes) -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        with suppress(anyio.BrokenResourceError):
            await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
            for _ in range(40):
                await stream.send(b"a" * 10_000)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 431 ")


MEBIBYTE = 1 << 20


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


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_refused_and_the_connection_goes_on(announced: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    async with serving(HttpAccess(body_bytes=LIMIT)) as listener, http_client(base_url=listener.url) as client:
        answer = await client.post("/", content=b"x" * (LIMIT + 1) if announced else chunks())
        assert answer.status_code == 413 and f"expected at most {LIMIT}" in answer.text
        assert (await client.post("/", content=b"x" * LIMIT)).text == str(LIMIT)


async def test_a_client_is_not_told_to_send_a_body_that_is_too_long() -> None:
    async with serving(HttpAccess(body_bytes=LIMIT)) as listener, connected(listener) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1001\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(("requests", "sent"), [(0, b""), (0, UNFINISHED), (1, UNFINISHED)])
async def test_a_connection_whose_headers_do_not_come_is_closed(requests: int, sent: bytes) -> None:
    async with serving(HttpAccess(header_s=0.2)) as listener, connected(listener) as stream:
        for _ in range(requests):
            await stream.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        if sent:
            await stream.send(sent)
        assert await read_to_end(stream) in (b"", b"0")


async def test_headers_that_began_behind_another_request_do_not_stay_open() -> None:
    async with serving(HttpAccess(header_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(ASK + UNFINISHED)
        assert [status for status, _ in answers_in(await read_to_end(stream))] == [200]


async def test_a_refused_body_that_does_not_end_is_cut_off() -> None:
    async with serving(HttpAccess(body_bytes=LIMIT, header_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 2_000)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 413 ")


async def test_a_connection_above_the_limit_gets_a_503_and_the_others_go_on() -> None:
    access = HttpAccess(connections=2, address_connections=2)
    async with serving(access) as listener, connected(listener) as first, connected(listener) as second:
        for stream in (first, second):
            await stream.send(UNFINISHED_BODY)
        async with connected(listener) as third:
            await third.send(ASK)
            answer = await read_to_end(third)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"too many connections" in answer
        for stream in (first, second):
            await stream.send(b"x")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")


async def test_probes_are_answered_when_all_connections_are_taken() -> None:
    async with serving(HttpAccess(connections=1)) as listener, connected(listener) as first:
        await first.send(UNFINISHED_BODY)
        async with connected(listener) as probe:
            await probe.send(ASK.replace(b" / ", b" /healthz "))
            assert (await read_to_end(probe)).startswith(b"HTTP/1.1 200 ")
        async with AsyncExitStack() as stack:  # nor does the reserve belong to one address
            for _ in range(2 * RESERVE):
                await (await stack.enter_async_context(connected(listener))).send(UNFINISHED)
            async with connected(listener, "127.0.0.2") as probe:
                await probe.send(ASK.replace(b" / ", b" /healthz "))
                assert (await read_to_end(probe)).startswith(b"HTTP/1.1 200 ")


async def test_one_address_does_not_take_all_connections() -> None:
    async with serving(HttpAccess(connections=8)) as listener, AsyncExitStack() as stack:
        for _ in range(20):
            await (await stack.enter_async_context(connected(listener))).send(UNFINISHED_BODY)
        async with connected(listener) as same:
            await same.send(ASK)
            assert (await read_to_end(same)).startswith(b"HTTP/1.1 503 ")
        async with connected(listener, "127.0.0.2") as other:
            await other.send(ASK)
            assert (await other.receive()).startswith(b"HTTP/1.1 200 ")


async def test_idle_connections_make_room_for_new_ones() -> None:
    access = HttpAccess(connections=2, address_connections=2)
    async with serving(access) as listener, connected(listener) as first, connected(listener) as second:
        for stream in (first, second):
            await stream.send(ASK)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        async with connected(listener) as third:
            await third.send(ASK)
            assert (await third.receive()).startswith(b"HTTP/1.1 200 ")
        assert await read_to_end(first) in (b"", b"0")
        await second.send(ASK)
        assert b"HTTP/1.1 200 " in await second.receive()


async def test_a_body_that_does_not_come_gets_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(HttpAccess(body_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(UNFINISHED_BODY)
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"expected all of it within 0.2 s" in answer
    monkeypatch.setattr("kvatlas.runtime.bounded_protocol.BODY_GRACE_S", 0.2)
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(UNFINISHED_BODY)  # slower than the least rate, long before its deadline
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 408 ")


async def test_unfinished_bodies_do_not_hold_up_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.runtime.bounded_protocol.STOP_S", 0.2)
    with anyio.fail_after(60):
        async with serving(HttpAccess(), grace_s=600) as listener, AsyncExitStack() as stack:
            for _ in range(5):
                stream = await stack.enter_async_context(connected(listener))
                await stream.send(UNFINISHED_BODY)
            probe = await stack.enter_async_context(connected(listener))
            await probe.send(ASK)
            assert (await probe.receive()).startswith(b"HTTP/1.1 200 ")
            stack.pop_all()


async def test_headers_above_the_limit_are_an_answer_and_no_reset() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        head = ASK[:-2]
        with suppress(anyio.BrokenResourceError):
            await stream.send(head)
            for number in range(40):
                await stream.send(b"x-%d: " % number + b"a" * 10_000 + b"\r\n")
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 431 ") and b"the headers have more than 65536 bytes" in answer
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(ASK[:-2] + b"x-a: " + b"a" * 66_000 + b"\r\n\r\n")  # in one piece
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 431 ")


async def test_a_target_with_a_host_is_its_path() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        for target in (b"http://x:1/healthz", b"HTTP://x", b"ftp://x/healthz"):
            await stream.send(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        await stream.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = (await read_to_end(stream)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"200", b"404", b"200"]


async def test_what_is_not_http_is_an_answer_in_json() -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"this is not HTTP/1.1" in answer


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
            assert answer.startswith(b"HTTP/1.1 400 ") and b"WebSockets are not served" in answer
        async with connected(listener) as stream:
            await stream.send(upgrade % b"h2c")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_stays_open_for_longer_than_clients_use_it() -> None:
    """With the same time on both ends a request is sent on a connection that is just being closed."""
    assert HttpAccess().idle_s > 600  # Google's balancers; clients keep theirs for less
    async with serving(HttpAccess(idle_s=0)) as listener, connected(listener) as stream:
        await stream.send(ASK)
        assert (await read_to_end(stream)).endswith(b"0")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic first", 401),
        ("Bearer first", 200),
        ("bearer second", 200),
    ],
)
async def test_a_request_needs_one_of_the_tokens(sent: str | None, status: int) -> None:
    access = HttpAccess(tokens=(b"first", b"second"))
    headers = {"authorization": sent} if sent else {}
    async with serving(access) as listener, http_client(base_url=listener.url, headers=headers) as client:
        answer = await client.get("/")
        assert answer.status_code == status
        assert status == 200 or (answer.headers["www-authenticate"] == "Bearer" and "no valid token" in answer.text)
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.options("/")).status_code == 200


async def test_a_server_with_a_certificate_speaks_tls_alone(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(HttpAccess(cert_file=cert, key_file=key)) as listener:
        assert listener.url.startswith("https://")
        async with httpx.AsyncClient(verify=trusting, base_url=listener.url) as client:
            assert (await client.get("/")).status_code == 200
        async with http_client() as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get(listener.url.replace("https", "http"))


def test_a_certificate_that_can_not_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(SettingsError, match="--http-cert-file .*cert.pem.* are not a certificate and its key"):
        listen("127.0.0.1", 0, "the test", HttpAccess(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "no.pem"))


@pytest.mark.parametrize("settings", [IndexerSettings, ProxySettings, PublishSettings])
def test_limits_certificate_and_tokens_are_settings(
    settings: type[IndexerSettings | ProxySettings | PublishSettings], tmp_path: Path
) -> None:
    needed = {"engine": "vllm", "endpoint": "tcp://127.0.0.1:1", "worker_id": "w", "model_id": "m"}
    given = {name: value for name, value in needed.items() if name in settings.model_fields}
    file = tmp_path / "tokens"
    file.write_text("first\nsecond\n")
    loaded = settings.load(**given, http_body_bytes="10", http_connections="3", http_token_file=str(file))
    assert loaded.http == HttpAccess(body_bytes=10, connections=3, tokens=(b"first", b"second"))
    assert "first" not in repr(loaded)
    with pytest.raises(SettingsError, match="--http-cert-file and --http-key-file belong together"):
        settings.load(**given, http_cert_file=str(file))
    file.write_text("two words\n")
    with pytest.raises(SettingsError, match="whose line 1 is not a token"):
        settings.load(**given, http_token_file=str(file))
