"""A client breaks HTTP's rules, at a router with everything switched on and at one with the defaults: no second request
reaches an engine, no line of the client's own reaches the log, and others are served."""

import asyncio
import re
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import ACME, COMPLETIONS, Process, bearer, completion, guarded_router, router_process
from tests.attacks.guarded_router import tenants_fleet as fleet_of_tenants
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ACME}\r\ncontent-type: application/json\r\n"
SECOND = "POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
SMUGGLES = {
    "two kinds of length": f"{HEAD}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{SECOND}",
    "two lengths": f"{HEAD}content-length: 2\r\ncontent-length: 60\r\n\r\n{{}}{SECOND}",
    "a list of lengths": f"{HEAD}content-length: 2, 60\r\n\r\n{{}}{SECOND}",
    "a signed length": f"{HEAD}content-length: +2\r\n\r\n{{}}{SECOND}",
    "a length with a space before the colon": f"{HEAD}content-length : 2\r\n\r\n{{}}{SECOND}",
    "another encoding": f"{HEAD}transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{SECOND}",
    "chunked twice": f"{HEAD}transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n{SECOND}",
    "a chunk of no size": f"{HEAD}transfer-encoding: chunked\r\n\r\n-1\r\n\r\n{SECOND}",
    "a chunk of a huge size": f"{HEAD}transfer-encoding: chunked\r\n\r\n{'f' * 40}\r\n{{}}\r\n{SECOND}",
    "a folded header": f"{HEAD}x-a: 1\r\n transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{{}}{SECOND}",
    "a bare line feed": f"{HEAD}x-a: 1\ncontent-length: 2\r\n\r\n{{}}{SECOND}",
    "a null byte": f"{HEAD}x-a: \0\r\ncontent-length: 2\r\n\r\n{{}}",
    "no host": f"POST {COMPLETIONS} HTTP/1.1\r\ncontent-length: 2\r\n\r\n{{}}",
    "long headers": HEAD + f"x-a: {'y' * 100_000}\r\n\r\n",
    "many headers": HEAD + "".join(f"x-{number}: 1\r\n" for number in range(10_000)) + "\r\n",
    "no HTTP": "\x16\x03\x01" * 100,
    "a tunnel": "CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: 169.254.169.254\r\n\r\n",
    "another host": f"GET http://169.254.169.254/latest HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ACME}\r\n\r\n",
    "an upgrade": f"{HEAD}connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{{}}{SECOND}",
}
FORGED = "2026-01-01T00:00:00.000Z error router: forged"
LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (debug|info|warning|error) ")


@pytest.mark.parametrize("guarded", [True, False], ids=["everything on", "defaults"])
async def test_what_is_no_request_reaches_no_engine_and_no_log(
    store: Store, valkey_url: str, tmp_path: Path, guarded: bool
) -> None:
    async with AsyncExitStack() as stack:
        _, recorder = await stack.enter_async_context(fleet_of_tenants(store))
        started = guarded_router(valkey_url, tmp_path) if guarded else router_process(valkey_url)
        router = await stack.enter_async_context(started)
        client = await stack.enter_async_context(http_client(base_url=router.url, timeout=60))

        async def is_served() -> bool:
            return (await client.post(COMPLETIONS, json=completion(), headers=bearer(ACME))).status_code in (200, 503)

        for act, data in SMUGGLES.items():
            codes = re.findall(rb"HTTP/1\.[01] (\d\d\d)", await say(router.port, data.encode("latin-1")))
            assert all(code[:1] in b"45" for code in codes), (act, codes)
        for text in (f"x\n{FORGED}", f"x\r{FORGED}", f"x\x1b[2K\u2028{FORGED}", f"x\\n{FORGED}"):
            said = completion(model=text, user=text)
            await client.post(COMPLETIONS, json=said, headers=bearer(ACME))
            await client.post("/v1/" + quote(text), headers=bearer(ACME))
            await say(router.port, f"{HEAD}x-session-id: {text}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert await is_served()
        assert b"smuggled" not in recorder.received
        await check_log(router)


async def say(port: int, data: bytes) -> bytes:
    """Send the data, close this half of the connection, and return the answers until the router ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = b""
    try:
        with suppress(ConnectionError, TimeoutError):
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(5):
                while part := await reader.read(65_536):
                    answered += part
    finally:
        writer.close()
    return answered


async def check_log(router: Process) -> None:
    lines = [line for line in await router.log() if line]
    assert [line for line in lines if not LINE.match(line)] == []
    assert [line for line in lines if line.startswith(FORGED)] == []
