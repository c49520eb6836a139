"""The store and the index that a command reads."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.errors import AccessDenied, InvalidValue, Unreachable
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.settings import Settings
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.output import print_notice


@asynccontextmanager
async def connect_store(settings: Settings) -> AsyncIterator[Store]:
    """Connect to the store in the settings, and close it at the end. A notice says why the command is waiting. Raises
    Unreachable."""
    try:
        store = await open_store(settings.redis, wait=settings.wait, on_wait=print_notice)
    except AccessDenied:
        raise
    except Unreachable as error:
        raise Unreachable(f"{error}; is it running there? --redis-url names another") from error
    try:
        yield store
    finally:
        await store.close()


async def open_index(store: Store, settings: Settings) -> RedisIndex:
    """The index in a store, for reading. Raises LayoutMismatch or, unless the command waits, NoIndexYet."""
    return await open_redis_index(store, writer=False, wait=settings.wait, on_wait=print_notice)


async def check_worker_known(store: Store, index: RedisIndex, worker_id: str) -> None:
    """Check that the worker is in the index or in the fleet. Raises InvalidValue."""
    record = await index.record(worker_id)
    if (record is None or not record.answering) and worker_id not in await FleetStore(store).all():
        raise InvalidValue(f"no worker {worker_id!r}: neither the index nor the fleet has it")
