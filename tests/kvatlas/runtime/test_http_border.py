"""What an HTTP server refuses: over real sockets, as clients of every kind would send it."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
import trustme
from anyio.abc import SocketStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvatlas.errors import SettingsError
from kvatlas.runtime.http_access import HttpAccess
from kvatlas.runtime.http_server import KEEP_ALIVE_S, Listener, listen, serve
from kvatlas.settings import IndexerSettings, ProxySettings, PublishSettings

pytestmark = pytest.mark.anyio

LIMIT = 1_000
UNFINISHED = b"GET / HTTP/1.1\r\nx-a: b\r\n"


async def _echo_length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


APPLICATION = Starlette(
    routes=[Route("/", _echo_length, methods=["GET", "POST", "OPTIONS"]), Route("/healthz", _echo_length)]
)


@asynccontextmanager
async def serving(access: HttpAccess) -> AsyncIterator[Listener]:
    listener = listen("127.0.0.1", 0, "the test", access)
    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, grace_s=0), APPLICATION, listener)
        yield listener
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(listener: Listener) -> AsyncIterator[SocketStream]:
    async with await anyio.connect_tcp(*listener.socket.getsockname()) as stream:
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
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
        assert b"Content-Length and Transfer-Encoding are both given" in answer


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_refused_and_the_connection_goes_on(announced: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    async with serving(HttpAccess(body_bytes=LIMIT)) as listener, httpx.AsyncClient(base_url=listener.url) as client:
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


async def test_a_refused_body_that_does_not_end_is_cut_off() -> None:
    async with serving(HttpAccess(body_bytes=LIMIT, header_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 2_000)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 413 ")


async def test_a_connection_above_the_limit_gets_a_503_and_the_others_go_on() -> None:
    async with serving(HttpAccess(connections=2)) as listener, httpx.AsyncClient(base_url=listener.url) as client:
        assert (await client.get("/")).status_code == 200
        async with connected(listener):
            async with connected(listener) as third:
                assert (await read_to_end(third)).startswith(b"HTTP/1.1 503 ")
            assert (await client.get("/")).status_code == 200


async def test_an_idle_connection_stays_open_for_longer_than_clients_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same time on both ends a request is sent on a connection that is just being closed."""
    assert max(60, httpx.Limits().keepalive_expiry or 0) < KEEP_ALIVE_S
    monkeypatch.setattr("kvatlas.runtime.http_server.KEEP_ALIVE_S", 0)
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
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
    async with serving(access) as listener, httpx.AsyncClient(base_url=listener.url, headers=headers) as client:
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
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get(listener.url.replace("https", "http"))


def test_a_certificate_that_can_not_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(SettingsError, match="--http-cert-file .*cert.pem.* are no certificate and its key"):
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
    with pytest.raises(SettingsError, match="whose line 1 is no token"):
        settings.load(**given, http_token_file=str(file))
