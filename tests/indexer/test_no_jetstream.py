"""NATS servers that can't keep a stream: one clear line at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import Process

from kvatlas.embedded import EmbeddedServer, child_command, nats_server
from kvatlas.embedded.binaries import nats_server_binary
from kvatlas.embedded.free_port import free_port
from kvatlas.errors import KvatlasError
from kvatlas.settings import IndexerSettings
from kvatlas_indexer.service import run_indexer

pytestmark = pytest.mark.anyio

ACCOUNT_WITHOUT_JETSTREAM = 'accounts: {A: {users: [{user: "u", password: "p"}]}}, no_auth_user: "u"'


@asynccontextmanager
async def nats_without_jetstream() -> AsyncIterator[str]:
    port = free_port()
    command = [str(nats_server_binary()), "-a", "127.0.0.1", "-p", str(port)]
    process: Process = await anyio.open_process(child_command(command))
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.aclose()


async def start_error(nats_url: str, redis_url: str) -> str:
    with pytest.raises(KvatlasError) as caught:
        await run_indexer(IndexerSettings.load(nats_url=nats_url, redis_url=redis_url))
    return str(caught.value)


async def test_nats_without_jetstream(valkey: EmbeddedServer) -> None:
    async with nats_without_jetstream() as url:
        line = await start_error(url, valkey.url)
    assert line == "stream KVATLAS_EVENTS can't be created: JetStream is not enabled there (nats-server -js)"


async def test_an_account_without_jetstream(valkey: EmbeddedServer) -> None:
    async with nats_server(config=ACCOUNT_WITHOUT_JETSTREAM) as server:
        line = await start_error(server.url, valkey.url)
    assert line == "stream KVATLAS_EVENTS can't be created: JetStream not enabled for account"
