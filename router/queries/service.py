"""Runs the index server as a process. Its replicas are stateless, so there can be any number of them, and all give the
same answers."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace

import anyio

from kvatlas.addresses import is_loopback
from kvatlas.errors import SettingsError
from kvatlas.http.server import listen, serve
from kvatlas.runtime.descriptors import most_requests
from kvatlas.settings import IndexServerSettings
from kvatlas.telemetry import export_metrics
from kvatlas_router.client_access import open_borders
from kvatlas_router.prompts.request_source import open_request_source
from kvatlas_router.prompts.route_body import RouteBodyReader
from kvatlas_router.queries.api import QueryApi
from kvatlas_router.queries.application import IndexApplication
from kvatlas_router.queries.changes.follow import ChangeStreams
from kvatlas_router.queries.holders import HolderQueries
from kvatlas_router.tenancy.entrance import Entrance
from kvatlas_router.tokens.prompt_reader import PromptSettings

GRACE_S = 2
CLOSE_S = 5.0
MOST_GRPC_CONNECTIONS = 1_024

_log = logging.getLogger("kvatlas_router.queries")


async def run_index_server(
    settings: IndexServerSettings, ready: Callable[[str, int | None], None] | None = None
) -> None:
    """Serve until cancelled. `ready` is called once, with the base URL and the gRPC port.

    Raises SettingsError for an address that can't be listened on or a tokenizer that can't be read, or Unreachable or
    LayoutMismatch if the store can't be used and `wait` is off.
    """
    with ExitStack() as listeners:
        access = settings.http
        access = replace(access, connections=min(access.connections, most_requests()))
        listener = listen(settings.host, settings.port, "the index server", access)
        listeners.callback(listener.close)
        control = None
        if settings.control_is_apart:
            what = "the index server's port for operators (--control-port)"
            control = listen(settings.control_host, settings.control_at, what, settings.control_http)
            listeners.callback(control.close)
            _log.info("operators' port: %s", control.url)
        async with open_index_server(settings) as (application, grpc_port), anyio.create_task_group() as tasks:
            if control is not None:
                assert application.control is not None
                tasks.start_soon(serve, application.control, control)
            await tasks.start(
                lambda task_status: serve(application.asgi, listener, grace_s=GRACE_S, task_status=task_status)
            )
            if ready is not None:
                ready(listener.url, grpc_port)
            await anyio.sleep_forever()


@asynccontextmanager
async def open_index_server(settings: IndexServerSettings) -> AsyncIterator[tuple[IndexApplication, int | None]]:
    """Open the application with all its parts; yields the application, and the port of the gRPC server if there is
    one."""
    prompts = PromptSettings(salt_is_tenant=settings.salt_is_tenant)
    stack = AsyncExitStack()
    try:
        reading = await stack.enter_async_context(open_request_source(settings, is_loopback(settings.host), prompts))
        holders = HolderQueries(reading.lookups, reading.fleet)
        stack.push_async_callback(holders.close)
        changes = ChangeStreams(reading.store, settings.nats)
        stack.push_async_callback(changes.close)
        api = QueryApi(
            RouteBodyReader(reading.reader, reading.catalogue),
            reading.catalogue,
            holders,
            changes,
            salt_is_tenant=settings.salt_is_tenant,
        )
        stack.enter_context(export_metrics("queries", api.counters))
        stack.enter_context(export_metrics("following", changes))
        borders = await stack.enter_async_context(open_borders(settings, reading.fleet, salts=settings.salt_is_tenant))
        grpc_port = await _serve_grpc(stack, settings, api, borders.entrance)
        apart = settings.control_is_apart
        yield IndexApplication(api, reading.catalogue, reading.lookups, borders, apart=apart), grpc_port
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await stack.aclose()


async def _serve_grpc(
    stack: AsyncExitStack, settings: IndexServerSettings, api: QueryApi, entrance: Entrance | None
) -> int | None:
    """Start the gRPC server and return its port. Raises SettingsError if the port can't be used or packages are missing."""
    if settings.grpc_port is None:
        return None
    try:
        from kvatlas_router.gateway.certificate import from_files
        from kvatlas_router.queries.grpc_api.server import GrpcServer
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--grpc-port needs {error.name}, which is not installed: pip install 'kvatlas[gateway]'"
        ) from error
    if settings.http_token_file is not None:
        raise SettingsError("--grpc-port and --http-token-file are both given; gRPC needs --clients-file")
    certificate, key = settings.http_cert_file, settings.http_key_file
    credentials = from_files(certificate, key) if certificate is not None and key is not None else None
    # each connection takes three descriptors; a client has one connection for all its calls
    most = min(settings.http_connections, MOST_GRPC_CONNECTIONS, max(1, most_requests() // 3))
    access = replace(settings.http, connections=most, cert_file=None, key_file=None, client_ca_file=None)
    listener = listen(settings.host, settings.grpc_port, "the index server's gRPC (--grpc-port)", access)
    stack.callback(listener.close)
    server = GrpcServer(api, entrance, listener, credentials)
    stack.enter_context(export_metrics("http", server.refused))
    stack.push_async_callback(server.stop)
    await server.start()
    return server.port
