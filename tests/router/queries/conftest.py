"""One server for the queries that need no special one."""

from collections.abc import AsyncIterator

import httpx
import pytest

from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.router.proxy.engines import record
from tests.router.queries.servers import running_index_server, write


@pytest.fixture
async def server(store: Store, valkey_url: str) -> AsyncIterator[httpx.AsyncClient]:
    await open_redis_index(store, writer=True)
    await write(store, record("w", "http://w:8000"))
    async with running_index_server(valkey_url) as (client, _):
        yield client
