"""Connections to the store that a benchmark uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.embedded import valkey_server
from kvatlas.store.connection import Store, open_store


@asynccontextmanager
async def connected_store(url: str) -> AsyncIterator[Store]:
    store = await open_store(url, wait=False)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def valkey_store() -> AsyncIterator[Store]:
    """An embedded Valkey of the benchmark's own."""
    async with valkey_server() as valkey, connected_store(valkey.url) as store:
        yield store


async def store_cpu_s(store: Store) -> float:
    """Processor time of the server since its start."""
    info = await store.client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])
