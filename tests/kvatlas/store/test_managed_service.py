"""A store as run by cloud providers refuses the commands that configure a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.errors import UnsuitableStore
from kvatlas.index.redis.layout import check_suitable
from kvatlas.store.connection import connected_store
from tests.end_to_end.processes import query, service

pytestmark = pytest.mark.anyio

REFUSED = (
    "ACL",
    "BGREWRITEAOF",
    "BGSAVE",
    "CONFIG",
    "DEBUG",
    "MIGRATE",
    "MONITOR",
    "REPLICAOF",
    "SAVE",
    "SHUTDOWN",
    "SYNC",
)
"""The commands that ElastiCache and Memorystore refuse according to their documentation."""


@contextmanager
def managed(policy: str) -> Iterator[str]:
    refusals = "".join(f'\nrename-command {command} ""' for command in REFUSED)
    with ValkeyProcess(settings={"maxmemory-policy": policy + refusals}) as server:
        yield server.url


async def test_a_policy_that_evicts_is_found_without_config() -> None:
    with managed("allkeys-lru") as url:
        async with connected_store(url, wait=False) as store:
            with pytest.raises(UnsuitableStore, match="maxmemory-policy is allkeys-lru; expected noeviction"):
                await check_suitable(store)


async def test_an_indexer_works_without_what_is_refused(fresh_nats: str, tmp_path: Path) -> None:
    with managed("noeviction") as url:
        servers = ["--nats-url", fresh_nats, "--redis-url", url]
        async with service("indexer", *servers, ready="is ready", cwd=tmp_path):
            await query("workers", *servers)
