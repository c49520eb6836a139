from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.sqlite.index import open_sqlite_index
from kvatlas.store.connection import connected_store
from tests.valkey_cluster import ClusterProcesses


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A Valkey cluster of three primaries, shared by the session."""
    with ClusterProcesses() as cluster:
        yield cluster.url


@pytest.fixture(
    params=["memory", "memory-4", "sqlite", "sqlite-4", "valkey", "valkey-4", "redis8", "redis8-4", "cluster-4"]
)
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ResidencyIndex]:
    """Every implementation, with one shard and with four."""
    kind, _, shards = request.param.partition("-")
    if kind == "memory":
        yield MemoryIndex(shards=int(shards or 1))
        return
    if kind == "sqlite":
        async with open_sqlite_index(tmp_path / "index", shards=int(shards or 1)) as opened:
            yield opened
        return
    async with connected_store(request.getfixturevalue(f"{kind}_url"), wait=False) as store:
        await store.client.flushall()
        yield await open_redis_index(store, shards=int(shards or 1), side_index=True, writer=True)
