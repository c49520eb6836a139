"""Runs one indexer process: connects, serves, and shuts down cleanly when cancelled."""

import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial

import anyio
from nats.errors import Error as NatsError

from kvatlas.bus.connection import connect_nats
from kvatlas.errors import KvatlasError, OtherFleet
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, FleetStore
from kvatlas.fleet_store.startup_failures import clear_trouble, report_trouble
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.runtime.retry import retry_until_reachable
from kvatlas.settings import IndexerSettings
from kvatlas.store.connection import Store, open_store
from kvatlas.telemetry import export_metrics
from kvatlas_indexer import gauges
from kvatlas_indexer.cleanup.library_expiry import LibraryExpiry
from kvatlas_indexer.indexer_process import Replica, default_member_id
from kvatlas_indexer.ownership.fleet_guard import FleetGuard
from kvatlas_indexer.partition.event_stream import EventStream, stream_settings

CLOSE_DEADLINE_S = 2.0
GC_ALLOCATIONS = 100_000

log = logging.getLogger("kvatlas.indexer")

__all__ = ["IndexerSettings", "run_indexer"]


async def run_indexer(settings: IndexerSettings, ready: Callable[[Replica], None] | None = None) -> None:
    """Run one replica until cancelled; its leases are then released immediately, and its connections are closed.

    The status page is served if `settings.status_port` is set (0: any free port). `ready` is called once, after the first round
    of leases (other replicas may hold them all). Raises Unreachable (without `wait`), LayoutMismatch, UnsuitableStore or
    SettingsError (for the status page's address), each with a one-line message. Later errors are logged, and the work is tried
    again.
    """
    async with AsyncExitStack() as stack:
        listener = None
        if settings.status_port is not None:
            from kvatlas.http.server import listen  # loading it takes 5 MiB, together with the page itself

            listener = stack.enter_context(
                closing(listen(settings.status_host, settings.status_port, "status page", settings.http))
            )
        store = await open_store(settings.redis, wait=settings.wait, on_wait=log.warning)
        stack.push_async_callback(_close, store.close)
        index = await open_redis_index(
            store,
            partitions=settings.partitions,
            shards=settings.shards,
            side_index=settings.side_index,
            number=settings.layout,
            writer=True,
            wait=settings.wait,
            on_wait=log.warning,
        )
        fleet = FleetStore(store, layout=index.layout.number)
        await retry_until_reachable(fleet.load_functions, wait=settings.wait, on_wait=log.warning)
        client = await connect_nats(settings.nats, name="kvatlas-indexer", wait=settings.wait, on_wait=log.warning)
        stack.push_async_callback(_close, client.close)
        # a connection delivers messages in order, so those that publishers may send without limit must not delay the events
        calls = await connect_nats(settings.nats, name="kvatlas-indexer-calls", wait=settings.wait, on_wait=log.warning)
        stack.push_async_callback(_close, calls.close)
        stream = EventStream(client, stream_settings(settings))
        member_id = settings.member_id or default_member_id()
        ensure = partial(_ensure_stream, stream, store, member_id)
        await retry_until_reachable(ensure, wait=settings.wait, on_wait=log.warning)
        guard = FleetGuard(calls, store, member_id, settings.nats.name, settings.fleet_id)
        await retry_until_reachable(partial(_join, guard, store, member_id), wait=settings.wait, on_wait=log.warning)
        replica = Replica(settings, client, calls, index, fleet, stream, index.layout.publishers, guard.fleet_id)
        counters = replica.counters
        with export_metrics("indexer", counters), export_metrics("messages_in", counters), _rare_collections():
            async with anyio.create_task_group() as group:
                if listener is not None:
                    from kvatlas.http.server import serve
                    from kvatlas_indexer.status_page.application import application

                    replica.status_url = listener.url
                    group.start_soon(serve, application(replica, index, FleetStore(store), calls), listener)
                group.start_soon(guard.run)
                group.start_soon(gauges.sample, replica, index, store)
                libraries = [INDEX_LIBRARY, FLEET_LIBRARY, POOL_LIBRARY]
                group.start_soon(LibraryExpiry(store, libraries, replica.counters, replica.owned).run)
                group.start_soon(replica.run, (lambda: ready(replica)) if ready is not None else None)


async def _ensure_stream(stream: EventStream, store: Store, member_id: str) -> None:
    """Create the event stream if it is missing; if that fails, record the reason in the store."""
    try:
        await stream.ensure()
    except KvatlasError as error:
        await report_trouble(store, member_id, str(error))
        raise
    await clear_trouble(store, member_id)


async def _join(guard: FleetGuard, store: Store, member_id: str) -> None:
    """Check that the store and NATS belong to one fleet; if they do not, record the reason in the store."""
    try:
        await guard.join()
    except OtherFleet as error:
        await report_trouble(store, member_id, str(error))
        raise


async def _close(close: Callable[[], Awaitable[object]]) -> None:
    """Close a connection within CLOSE_DEADLINE_S, even when cancelled."""
    with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
        try:
            await close()
        except NatsError as error:
            log.debug("NATS connection: %s", error)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage cycles less often: decoded messages consist of many small lists without cycles, and scanning the queued
    ones would take a sixth of the reading time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], GC_ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
