"""Engines behind an API key, and behind TLS with certificates from a private authority."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvatlas.engine_access import EngineAccess
from kvatlas.store.connection import Store
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient, EngineUnreachable
from tests.certificates import Authority, IssuedFiles
from tests.eventually import until
from tests.router.proxy.engines import MODEL, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import FaultyEngine, faulty_engine, well

pytestmark = pytest.mark.anyio

KEY = "sk-of-the-engine"
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def tls_engine(files: IssuedFiles) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(GOOD)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=files.server_context())
    async with server:
        yield server.sockets[0].getsockname()[1]


def trusting(authority: Path | None) -> EngineClient:
    return EngineClient(AddressPolicy(near=True, access=EngineAccess(ca_file=authority)), timeout_s=60)


async def test_a_private_authority_is_trusted_if_it_is_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with tls_engine(authority.issue("localhost")) as port:
        async with trusting(authority.file) as client:
            assert (await client.call("GET", f"https://localhost:{port}/")).status == 200
        async with trusting(None) as client:
            with pytest.raises(EngineUnreachable, match="certificate is not trusted.*--engine-ca-file") as raised:
                await client.call("GET", f"https://localhost:{port}/")
        assert not raised.value.connected


@pytest.mark.parametrize("origin", ["HTTPS://localhost", "https://LOCALHOST", "https://localhost."])
async def test_a_name_may_be_written_in_capitals_and_with_its_last_dot(
    tmp_path: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo  # it does not resolve this machine's names with a dot
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve(host.rstrip("."), *rest, **more))
    authority = Authority(tmp_path)
    async with tls_engine(authority.issue("localhost")) as port, trusting(authority.file) as client:
        assert (await client.call("GET", f"{origin}:{port}/")).status == 200


async def test_the_environment_names_an_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with tls_engine(authority.issue("localhost")) as port, trusting(None) as client:
        assert (await client.call("GET", f"https://localhost:{port}/")).status == 200


@pytest.mark.parametrize(("named", "other"), [("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")])
async def test_each_name_of_an_address_is_checked_by_itself(tmp_path: Path, named: str, other: str) -> None:
    authority = Authority(tmp_path)
    async with tls_engine(authority.issue(named)) as port, trusting(authority.file) as client:
        for _ in range(2):
            assert (await client.call("GET", f"https://{named}:{port}/")).status == 200
            with pytest.raises(EngineUnreachable, match="certificate is not trusted"):
                await client.call("GET", f"https://{other}:{port}/")


def keys_shown(engine: FaultyEngine) -> set[str | None]:
    return {request.headers.get("authorization") for request in engine.requests}


async def test_our_own_calls_carry_the_engines_key_and_clients_requests_do_not(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"w1 {KEY}\n")
    async with faulty_engine(well) as engine, running_fleet(store, {}) as fleet:
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, engine_key_file=tmp_path / "keys") as client:
            answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a text"})
            assert answer.status_code == 200
        by_path = {request.url.path: request.headers.get("authorization") for request in engine.requests}
    assert by_path == {"/tokenize": f"Bearer {KEY}", "/v1/completions": None}


async def test_a_refused_call_for_tokens_names_the_cure(store: Store, valkey_url: str) -> None:
    async with faulty_engine(well) as engine, running_fleet(store, {}) as fleet:
        engine.key = KEY
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, credentials_to="*") as client:

            async def is_named() -> bool:
                body = {"model": MODEL, "prompt": "a text"}
                headers = {"authorization": f"Bearer {KEY}"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
                findings = (await client.get("/status")).json()["findings"]
                return any("status 401" in line and "--engine-key-file" in line for line in findings)

            await until(is_named, what="the finding")


def test_each_worker_has_its_own_key() -> None:
    policy = AddressPolicy(near=True, access=EngineAccess.parse("sk-all\nw1 sk-one"))
    policy.update([record("w1", "http://127.0.0.1:8001"), record("w2", "http://127.0.0.1:8002")])
    assert policy.own_key("http://127.0.0.1:8001") == "sk-one"
    assert policy.own_key("http://127.0.0.1:8002") == "sk-all" == policy.own_key("http://127.0.0.1:9")
