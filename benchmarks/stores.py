"""The store that a benchmark uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.embedded import valkey_server
from kvatlas.store.connection import Store, connected_store


@asynccontextmanager
async def valkey_store() -> AsyncIterator[Store]:
    """An embedded Valkey for one benchmark."""
    async with valkey_server() as valkey, connected_store(valkey.url, wait=False) as store:
        yield store


async def store_cpu_s(store: Store) -> float:
    """The server's CPU time since its start."""
    info = await store.client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])
