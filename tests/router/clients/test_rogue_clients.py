"""Clients attack a `kvatlas router` process over raw sockets: they fail, and others are served."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from kvatlas.store.connection import Store
from tests.end_to_end.processes import environment, kvatlas_command, line_with
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
UNFINISHED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
)


class Router:
    """The process, its URLs, and a reader of its log."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, control_url: str) -> None:
        self.process = process
        self.url = url
        self.control_url = control_url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def stop(self, within_s: float = 60.0) -> str:
        """Stop the router, and return its log up to the end."""
        assert self.process.stderr is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(within_s):
            log = await self.process.stderr.read()
            await self.process.wait()
        return log.decode()


@asynccontextmanager
async def running_router(redis_url: str, *flags: str) -> AsyncIterator[Router]:
    """A router with a port for operators."""
    words = ["router", "--redis-url", redis_url, "--port", "0", "--control-port", "0", "--tokenizer", "none"]
    words += ["--drain-s", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*words), stderr=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        control = (await line_with("operators' port", process.stderr)).split()[-1]
        said = await line_with("router at", process.stderr)
        yield Router(process, next(word for word in said.split() if word.startswith("http://")).rstrip(";"), control)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def send(port: int, data: bytes, *, own: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(own, 0))
    writer.write(data)
    await writer.drain()
    return reader, writer


async def exchange(port: int, data: bytes) -> bytes:
    """Send the data, and return everything until the router closes the connection; a reset raises ConnectionResetError."""
    reader, writer = await send(port, data)
    with anyio.fail_after(60):
        answer = await reader.read()
    writer.close()
    return answer


async def test_unfinished_bodies_neither_hold_a_stop_nor_take_the_router_from_others(
    store: Store, valkey_url: str
) -> None:
    async with (
        running_fleet(store, {"w1": {}}),
        running_router(valkey_url, "--http-connections", "40", "--grace-s", "600") as router,
        AsyncExitStack() as stack,
    ):
        for _ in range(60):
            _, writer = await send(router.port, UNFINISHED)
            stack.callback(writer.close)
        others = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=router.url, transport=others, timeout=60) as client:
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        async with http_client(timeout=60) as client:
            assert (await client.get(f"{router.url}/health")).status_code in (200, 503)  # its own share is taken
            assert (await client.get(f"{router.control_url}/health")).status_code == 200
        await router.stop(within_s=30)
        assert router.process.returncode == 0


async def test_what_no_engine_serves_is_refused_and_no_name_writes_a_second_line_into_the_log(
    store: Store, valkey_url: str
) -> None:
    """It is refused as engines' frameworks do."""
    forged = "m\n2026-01-01T00:00:00.000Z error store: gone\r\n\x1b[2J" + "x" * 10_000
    async with running_fleet(store, {"w1": {}}), running_router(valkey_url) as router:
        async with http_client(base_url=router.url, timeout=60) as client:
            for path in ("/health/", f"{CHAT}/", f"{CHAT}//"):
                moved = await client.post(path, json=ASK) if "chat" in path else await client.get(path)
                assert moved.status_code == 307 and moved.headers["location"].endswith(path.rstrip("/"))
            assert (await client.post(f"{CHAT}/", json=ASK, follow_redirects=True)).status_code == 200
            for path in (
                "//health",
                "//v1/models",
                "/v1//chat/completions",
                "/v1/../pause",
                "/%70ause",
                "/v1/models/../x",
            ):
                assert (await client.post(path, json=ASK)).status_code in (404, 405), path
            assert (await client.head("/health")).status_code == 200
            assert (await client.head("/v1/models")).status_code == 200
            listed = await client.get("/v1/models/")
            assert listed.status_code == 307 and listed.headers["location"].endswith("/v1/models")
            for method in ("HEAD", "GET", "PUT", "DELETE", "TRACE"):
                wrong = await client.request(method, CHAT)
                assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
        upgrade = b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
        assert b"WebSockets are not supported" in await exchange(router.port, upgrade)
        proxied = b"GET http://x/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert (await exchange(router.port, proxied)).startswith(b"HTTP/1.1 200 ")
        large = b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 2_000_000
        answer = await exchange(router.port, large)
        assert answer.startswith(b"HTTP/1.1 431 ") and b"the headers are longer than" in answer
        for head in (
            b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n",
            b"GET http://x/%0a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ):
            assert await exchange(router.port, head.replace(b"host: x:443", b"host: x\r\nconnection: close"))
        async with http_client(base_url=router.url, timeout=60) as client:
            for body in (
                {**ASK, "model": forged},
                {**ASK, "user": forged, "cache_salt": forged, "prompt_cache_key": forged},
            ):
                named = await client.post(
                    CHAT, json=body, headers={"x-session-id": 'a\t;"b', "x-request-id": "r" * 5_000}
                )
                assert "\n" not in named.headers.get("x-kvatlas-decision", "")
            assert (await client.post("/v1/%0aerror%20x/" + "y" * 5_000, json=ASK)).status_code == 404
            assert (await client.request("X" * 500, CHAT)).status_code == 400
        log = await router.stop()
        assert "\n2026-01-01" not in log and "\x1b" not in log and "Traceback" not in log
        assert max(map(len, log.splitlines())) < 2_000


async def test_operators_calls_are_on_a_port_of_their_own_and_bookings_are_bounded(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("operator\n")
    async with (
        running_fleet(store, {"w1": {}}),
        running_router(valkey_url, "--control-token-file", str(tokens), "--record", "--held-requests", "3") as router,
        http_client(timeout=60) as client,
    ):
        hints = {"model": MODEL, "token_ids": [1] * 64}
        for method, path in (("POST", "/kvatlas/route"), ("POST", "/kvatlas/done"), ("GET", "/status"), ("GET", "/metrics"),
                             ("GET", "/kvatlas/requests"), ("GET", "/"), ("POST", "/")):  # fmt: skip
            answer = await client.request(method, router.url + path, json=hints if method == "POST" else None)
            assert answer.status_code == 404, path
            assert (await client.request(method, router.control_url + path)).status_code == 401
        assert (await client.post(router.url + CHAT, json=ASK)).status_code == 200
        assert (await client.post(router.control_url + CHAT, json=ASK)).status_code == 401
        operator = {"authorization": "Bearer operator"}
        assert (await client.post(router.control_url + CHAT, json=ASK, headers=operator)).status_code == 404
        assert (await client.get(f"{router.control_url}/status", headers=operator)).json()["proxy"]["answered"] == 1
        client.headers.update(operator)
        route, ids = f"{router.control_url}/kvatlas/route", []
        for _ in range(3):
            routed = (await client.post(route, json=hints)).json()
            assert routed["worker"] == "w1"
            ids.append(routed["id"])
        full = await client.post(route, json=hints)
        assert full.status_code == 503 and "3 bookings of this client" in full.json()["error"]["message"]
        done = await client.post(f"{router.control_url}/kvatlas/done", json={"id": ids[0]})
        assert done.json() == {"known": True}
        many = await client.post(route, content=json.dumps({"block_hashes": list(range(1_000_000))}))
        assert many.status_code == 400 and "expected at most 16384" in many.json()["error"]["message"]
        for url in (router.url, router.control_url):
            assert (await client.get(f"{url}/readyz")).status_code == 200
