"""An HTTP server refuses what is too much, too late or without proof."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvatlas.errors import SettingsError
from kvatlas.http.access import HttpAccess
from kvatlas.http.connection_shares import RESERVE, RESERVE_SHARE
from kvatlas.http.server import Listener, listen
from kvatlas.settings import IndexerSettings, ProxySettings, PublishSettings
from tests.http_client import http_client
from tests.kvatlas.http.listener import (
    ASK,
    UNFINISHED,
    answers_in,
    connected,
    read_to_end,
    serving,
)

pytestmark = pytest.mark.anyio

LIMIT = 1_000
UNFINISHED_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123456789"


@pytest.mark.parametrize("endless", [b"0\r\nx-a: ", b"0;x="])
async def test_trailers_and_extensions_are_bounded(endless: bytes) -> None:
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        with suppress(anyio.BrokenResourceError):
            await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
            for _ in range(40):
                await stream.send(b"a" * 10_000)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 431 ")


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


async def test_headers_that_began_after_another_request_do_not_stay_open() -> None:
    async with serving(HttpAccess(header_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(ASK + UNFINISHED)
        assert [status for status, _ in answers_in(await read_to_end(stream))] == [200]


async def test_a_refused_body_that_does_not_end_is_cut_off() -> None:
    async with serving(HttpAccess(body_bytes=LIMIT, header_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 2_000)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 413 ")


async def test_a_connection_is_idle_after_a_body_that_came_behind_its_refusal(caplog: pytest.LogCaptureFixture) -> None:
    """HTTP clients send headers and body separately. They may use the connection again, for as long as any other."""
    access = HttpAccess(body_bytes=LIMIT, header_s=0.2, idle_s=1)
    async with serving(access) as listener, connected(listener) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")
        await stream.send(b"x" * 1001)
        assert await read_to_end(stream) == b""
    assert "no whole request" not in caplog.text


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


@pytest.mark.parametrize("next_one", [UNFINISHED, UNFINISHED_BODY, b"\x01 no HTTP"])
async def test_what_follows_a_refused_body_at_once_is_not_idle(
    next_one: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that reads a request, or a refusal, makes no room for a new one."""
    monkeypatch.setattr("kvatlas.http.bounded_protocol.LINGER_S", 60.0)
    access = HttpAccess(body_bytes=LIMIT, header_s=60.0, connections=1, address_connections=1)
    async with serving(access) as listener, connected(listener) as first:
        await first.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        assert (await first.receive()).startswith(b"HTTP/1.1 413 ")
        await first.send(b"x" * 1001 + next_one)
        async with connected(listener) as second:
            await second.send(ASK)
            assert (await read_to_end(second)).startswith(b"HTTP/1.1 503 ")
        assert listener.shares.is_nearly_full
        if next_one == UNFINISHED_BODY:
            await first.send(b"x")
            assert (await first.receive()).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_whose_refused_body_still_comes_is_not_idle() -> None:
    access = HttpAccess(body_bytes=LIMIT, header_s=60.0, connections=1, address_connections=1)
    async with serving(access) as listener, connected(listener) as first:
        await first.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        assert (await first.receive()).startswith(b"HTTP/1.1 413 ")
        async with connected(listener) as second:
            await second.send(ASK)
            assert (await read_to_end(second)).startswith(b"HTTP/1.1 503 ")
        await first.send(b"x" * 1001 + ASK)
        assert (await first.receive()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_does_not_come_gets_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(HttpAccess(body_s=0.2)) as listener, connected(listener) as stream:
        await stream.send(UNFINISHED_BODY)
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"it must arrive within 0.2 s" in answer
    monkeypatch.setattr("kvatlas.http.bounded_protocol.BODY_GRACE_S", 0.2)
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(UNFINISHED_BODY)  # slower than the least rate, long before its deadline
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 408 ")


async def test_unfinished_bodies_do_not_hold_up_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.http.bounded_protocol.STOP_S", 0.2)
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
        assert answer.startswith(b"HTTP/1.1 431 ") and b"the headers are longer than 65536 bytes" in answer
    async with serving(HttpAccess()) as listener, connected(listener) as stream:
        await stream.send(ASK[:-2] + b"x-a: " + b"a" * 66_000 + b"\r\n\r\n")  # in one piece
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 431 ")


async def test_an_idle_connection_stays_open_for_longer_than_clients_use_it() -> None:
    """If both ends used the same time, a request would be sent on a connection that is just being closed."""
    assert HttpAccess().idle_s > 600  # Google's balancers; clients keep theirs for less
    async with serving(HttpAccess(idle_s=0)) as listener, connected(listener) as stream:
        await stream.send(ASK)
        assert (await read_to_end(stream)).endswith(b"0")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer second"}, 200),
        ({"authorization": "Basic first", "x-api-key": "second"}, 200),
        ({"api-key": "first"}, 200),
    ],
)
async def test_a_request_needs_one_of_the_tokens(sent: dict[str, str], status: int) -> None:
    """Anthropic's and Azure's clients send theirs in their own headers."""
    access = HttpAccess(tokens=(b"first", b"second"))
    async with serving(access) as listener, http_client(base_url=listener.url, headers=sent) as client:
        answer = await client.get("/")
        assert answer.status_code == status
        assert status == 200 or (answer.headers["www-authenticate"] == "Bearer" and "no valid token" in answer.text)
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.options("/")).status_code == 200


def certified(folder: Path, **changed: Any) -> tuple[HttpAccess, ssl.SSLContext]:
    """A server's access with a certificate, and a client's context that trusts it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return HttpAccess(cert_file=cert, key_file=key, **changed), trusting


async def test_a_connection_that_does_not_agree_on_tls_has_a_place_like_any_other(tmp_path: Path) -> None:
    """It may take no longer than for its headers. Without a place, it is closed at once."""
    access, trusting = certified(tmp_path, connections=2, address_connections=2, header_s=3.0)
    async with serving(access) as listener, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(listener)) for _ in range(2 + RESERVE_SHARE)]
        for _ in range(3):
            async with connected(listener) as refused:
                assert await read_to_end(refused) == b""
        from_elsewhere = httpx.AsyncHTTPTransport(verify=trusting, local_address="127.0.0.2")
        async with httpx.AsyncClient(transport=from_elsewhere, base_url=listener.url, timeout=60) as probe:
            assert (await probe.get("/healthz")).status_code == 200
        for stream in silent:
            assert await read_to_end(stream) == b""
        async with httpx.AsyncClient(verify=trusting, base_url=listener.url, timeout=60) as client:
            assert (await client.get("/")).status_code == 200


async def test_refusals_that_are_not_read_hold_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.http.bounded_protocol.LINGER_S", 30.0)
    async with serving(HttpAccess(connections=1, address_connections=1)) as listener, AsyncExitStack() as stack:
        for _ in range(1 + RESERVE_SHARE + RESERVE):
            await (await stack.enter_async_context(connected(listener))).send(UNFINISHED)
        async with connected(listener) as one_more:
            assert await read_to_end(one_more) == b""


async def test_a_client_that_reads_nothing_of_its_answer_is_disconnected() -> None:
    ended = anyio.Event()

    async def endless(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    await anyio.lowlevel.checkpoint()
                    yield b"x" * 65_536
            finally:
                ended.set()

        return StreamingResponse(parts())

    application = Starlette(routes=[Route("/", endless)])
    async with serving(HttpAccess(unread_s=0.1), application=application) as listener, connected(listener) as client:
        await client.send(ASK)
        with anyio.fail_after(60):
            await ended.wait()


async def test_a_server_with_a_certificate_speaks_tls_alone(tmp_path: Path) -> None:
    access, trusting = certified(tmp_path)
    async with serving(access) as listener:
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


@pytest.mark.parametrize(
    ("path", "forms"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/%6dessages", "anthropic"),
        ("/v1/chat/completions", "openai"),
        ("/", "openai"),
    ],
)
async def test_every_refusal_has_the_form_of_the_paths_api(
    path: str, forms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.http.bounded_protocol.LINGER_S", 60.0)
    ask = f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode()
    long_header = b"x-a: " + b"a" * 66_000
    unfinished = ask + b"content-length: 10\r\n\r\n1"

    async def refusal(listener: Listener, sent: bytes, client: str | None = None) -> tuple[int, Mapping[str, Any]]:
        async with connected(listener, client) as stream:
            await stream.send(sent)
            ((status, body),) = answers_in(await read_to_end(stream))
            return status, json.loads(body)

    refused = []
    async with serving(HttpAccess(body_s=0.2)) as listener:
        for sent in (
            ask + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
            ask + b"bad header\r\n\r\n",
            ask + b"host: y\r\n\r\n",
            ask + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
            ask + b"content-type: text/plain\r\norigin: http://y\r\n\r\n",
            ask + long_header,
            ask + long_header + b"\r\n\r\n",
            unfinished,
        ):
            refused.append(await refusal(listener, sent))
    async with serving(HttpAccess(tokens=(b"a",))) as listener:
        refused.append(await refusal(listener, ask + b"connection: close\r\n\r\n"))
    async with serving(HttpAccess(connections=1)) as listener, AsyncExitStack() as stack:
        for number in range(1 + RESERVE):  # one place, then those for probes
            own = f"127.0.0.{2 + number // RESERVE_SHARE}"
            await (await stack.enter_async_context(connected(listener, own))).send(UNFINISHED)
            if number in (0, RESERVE):
                refused.append(await refusal(listener, ask + b"\r\n", "127.0.1.1"))
    assert [status for status, _ in refused] == [400, 400, 400, 400, 403, 431, 431, 408, 401, 503, 503]
    for status, body in refused:
        if forms == "anthropic":
            assert body["type"] == "error" and set(body["error"]) == {"type", "message"}, status
        else:
            assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, status
    types = [body["error"]["type"] for _, body in refused]
    if forms == "anthropic":
        assert types[4:] == [
            "permission_error",
            *["invalid_request_error"] * 3,
            "authentication_error",
            *["overloaded_error"] * 2,
        ]
    else:
        assert types == [*["invalid_request_error"] * 9, *["server_error"] * 2]
