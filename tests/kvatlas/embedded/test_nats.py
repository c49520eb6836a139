from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from kvatlas.embedded import EmbeddedServerError, nats_server
from kvatlas.embedded.nats import MIB
from tests.kvatlas.embedded.process_table import is_alive, listening_ports

pytestmark = pytest.mark.anyio


async def last_seq(url: str, stream: str) -> int:
    client = await nats.connect(url)
    try:
        return (await client.jetstream().stream_info(stream)).state.last_seq
    finally:
        await client.close()


async def publish_one(url: str, storage: StorageType) -> None:
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        await jetstream.add_stream(StreamConfig(name="S", subjects=["s"], storage=storage))
        await jetstream.publish("s", b"1")
    finally:
        await client.close()


@pytest.mark.parametrize("storage", [StorageType.FILE, StorageType.MEMORY])
async def test_jetstream_works_and_the_server_is_gone_after_exit(storage: StorageType) -> None:
    async with nats_server() as server:
        pid, data_dir = server.pid, server.process.data_dir
        await publish_one(server.url, storage)
        assert await last_seq(server.url, "S") == 1
    assert not is_alive(pid)
    assert not data_dir.exists()


async def test_it_listens_on_loopback_only() -> None:
    async with nats_server() as server:
        assert listening_ports(server.pid) == {server.port: True}


async def test_streams_may_not_reserve_more_than_the_limits() -> None:
    async with nats_server(max_file_store_bytes=64 * MIB, max_memory_store_bytes=32 * MIB) as server:
        client = await nats.connect(server.url)
        try:
            jetstream = client.jetstream()
            await jetstream.add_stream(StreamConfig(name="FITS", subjects=["f"], max_bytes=60 * MIB))
            for storage in StorageType:
                with pytest.raises(nats.js.errors.APIError, match="insufficient"):
                    await jetstream.add_stream(
                        StreamConfig(name="LARGE", subjects=["l"], storage=storage, max_bytes=65 * MIB)
                    )
        finally:
            await client.close()


async def test_restart_keeps_port_and_files() -> None:
    async with nats_server() as server:
        await publish_one(server.url, StorageType.FILE)
        url, pid = server.url, server.pid
        await server.restart()
        assert (server.url, await last_seq(url, "S")) == (url, 1)
        assert server.pid != pid


async def test_a_killed_server_is_gone_until_it_is_started_again() -> None:
    async with nats_server() as server:
        await publish_one(server.url, StorageType.FILE)
        pid = server.pid
        await server.kill()
        assert not is_alive(pid)
        assert not server.is_running
        with pytest.raises(EmbeddedServerError, match=f"nats-server on port {server.port} is not running"):
            _ = server.pid
        await server.start()
        assert await last_seq(server.url, "S") == 1


async def test_a_given_directory_outlives_the_server(tmp_path: Path) -> None:
    directory = tmp_path / 'with "quotes" and spaces'
    async with nats_server(data_dir=directory) as server:
        await publish_one(server.url, StorageType.FILE)
    async with nats_server(data_dir=directory) as server:
        assert await last_seq(server.url, "S") == 1


async def test_credentials_are_required_and_are_in_the_url() -> None:
    async with nats_server(user="me", password="secret~1") as server:
        await publish_one(server.url, StorageType.MEMORY)
        client = Client()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await client.connect(f"nats://127.0.0.1:{server.port}", allow_reconnect=False)
        await client.close()


@pytest.mark.parametrize(("user", "password"), [("me", "p@ss"), ("a b", "pass")])
def test_credentials_that_the_client_would_misread_are_refused(user: str, password: str) -> None:
    with pytest.raises(EmbeddedServerError, match="only characters that a URL keeps"):
        nats_server(user=user, password=password)


async def test_further_configuration_is_passed_to_nats() -> None:
    async with nats_server(config="max_payload: 2048") as server:
        client = await nats.connect(server.url)
        try:
            assert client.max_payload == 2048
        finally:
            await client.close()
