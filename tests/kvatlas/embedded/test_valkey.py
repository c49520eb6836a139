from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvatlas.embedded import valkey_server
from tests.kvatlas.embedded.process_table import is_alive, listening_ports

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["valkey", "redis8"])
def binary(request: pytest.FixtureRequest, redis8_binary: Path) -> Path | None:
    """None, for the default program, and then the path of another one."""
    return redis8_binary if request.param == "redis8" else None


def connect(url: str, **options: Any) -> "redis.asyncio.Redis":
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url, **options)
    return client


async def test_it_never_evicts_and_saves_nothing(binary: Path | None) -> None:
    async with valkey_server(binary=binary) as server:
        pid, data_dir = server.pid, server.process.data_dir
        async with connect(server.url, decode_responses=True) as client:
            wanted = {
                "maxmemory-policy": "noeviction",
                "hash-max-listpack-entries": "128",
                "save": "",
                "appendonly": "no",
                "maxmemory": "0",
            }
            assert await client.config_get(*wanted) == wanted
        assert listening_ports(pid) == {server.port: True}
    assert not is_alive(pid)
    assert not data_dir.exists()


async def test_memory_can_be_limited(binary: Path | None) -> None:
    async with valkey_server(binary=binary, max_memory_bytes=2 << 20) as server, connect(server.url) as client:
        await client.setrange("fills", 3 << 20, b"x")
        with pytest.raises(OutOfMemoryError):
            await client.set("one more", b"x")


async def test_further_settings_override_the_defaults(binary: Path | None) -> None:
    settings = {"maxmemory-policy": "allkeys-lru"}
    async with (
        valkey_server(binary=binary, settings=settings) as server,
        connect(server.url, decode_responses=True) as client,
    ):
        assert await client.config_get("maxmemory-policy") == settings


async def test_with_appendonly_acknowledged_writes_survive_a_kill(binary: Path | None) -> None:
    async with valkey_server(binary=binary, appendonly=True) as server:
        url, pid = server.url, server.pid
        async with connect(url) as client:
            await client.set("k", "v")
        await server.kill()
        assert not is_alive(pid)
        await server.start()
        assert server.url == url
        async with connect(url) as client:
            assert await client.get("k") == b"v"


async def test_without_appendonly_a_restart_loses_all_data(binary: Path | None) -> None:
    async with valkey_server(binary=binary) as server:
        url = server.url
        async with connect(url) as client:
            await client.set("k", "v")
        await server.restart()
        assert server.url == url
        async with connect(url) as client:
            assert await client.get("k") is None


async def test_a_paused_server_answers_nothing_until_it_is_resumed(binary: Path | None) -> None:
    async with (
        valkey_server(binary=binary) as server,
        connect(server.url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) as client,
    ):
        server.pause()
        with pytest.raises(RedisTimeoutError):
            await client.ping()
        server.resume()
        assert await client.ping()


async def test_a_paused_server_can_be_stopped_and_killed(binary: Path | None) -> None:
    async with valkey_server(binary=binary) as server:
        for end in (server.stop, server.kill):
            pid = server.pid
            server.pause()
            await end()
            assert not is_alive(pid)
            await server.start()


async def test_a_password_is_required_and_is_in_the_url_but_not_in_the_process_list(binary: Path | None) -> None:
    async with valkey_server(binary=binary, password='p@ss "word"/\\') as server:
        async with connect(server.url) as client:
            assert await client.ping()
        async with connect(f"redis://127.0.0.1:{server.port}") as client:
            with pytest.raises(AuthenticationError):
                await client.ping()
        assert b"word" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
