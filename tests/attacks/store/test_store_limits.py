"""The store's own client limits stop users that send too much, or leave too much unread."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kvatlas.embedded.valkey import ValkeyProcess
from tests.eventually import until_sync
from tests.kvatlas_cli.auth.store_servers import DEBIAN

BLOCKS = "kva:{s0}:blocks:00"


@pytest.fixture(scope="module", params=["valkey", "redis8", "debian"])
def limited_store(request: pytest.FixtureRequest) -> Iterator[ValkeyProcess]:
    """A server with client limits as in docs/operations.md, but smaller."""
    binary = DEBIAN if request.param == "debian" else None
    if request.param == "redis8":
        binary = request.getfixturevalue("redis8_binary")
    if binary == DEBIAN and not DEBIAN.exists():
        pytest.skip("Debian's redis-server is not installed; apt-get install redis-server")
    limits = {"client-query-buffer-limit": "4mb", "client-output-buffer-limit": "normal 8mb 2mb 60"}
    with ValkeyProcess(binary=binary, settings=limits) as server:
        yield server


def clients_of(server: ValkeyProcess) -> int:
    return int(server.command("INFO", "clients")["connected_clients"])


def test_an_argument_that_is_too_long_closes_its_connection(limited_store: ValkeyProcess) -> None:
    with Redis.from_url(limited_store.url, retry=None) as client, pytest.raises((RedisConnectionError, OSError)):
        client.execute_command("HMGET", BLOCKS, b"\0" * 8_000_000)
    assert limited_store.command("PING")


def test_a_client_that_reads_no_answers_is_disconnected(limited_store: ValkeyProcess) -> None:
    limited_store.command("SET", "kva:long", b"x" * 1_000_000)
    before = clients_of(limited_store)
    with socket.create_connection(("127.0.0.1", limited_store.port)) as client, contextlib.suppress(OSError):
        client.sendall(b"GET kva:long\r\n" * 100)
        until_sync(lambda: clients_of(limited_store) == before, what="the client is disconnected")
    assert int(limited_store.command("INFO", "memory")["used_memory"]) < 40_000_000
