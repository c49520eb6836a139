"""The store that a command reads, opened and closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.settings import Settings
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.output import print_notice


@asynccontextmanager
async def connect_store(settings: Settings) -> AsyncIterator[Store]:
    """The store of the settings, closed at the end; a notice says why the command waits. Raises Unreachable."""
    store = await open_store(settings.redis_url, wait=settings.wait, on_wait=print_notice)
    try:
        yield store
    finally:
        await store.close()
