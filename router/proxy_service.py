"""Runs the proxy as a process: the parts that route requests, connections to the engines, and a server.

When cancelled, it drains. First it reports that it is not ready but still takes requests, until load balancers have noticed.
Then it takes no more requests, and lets the running ones finish.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from math import ceil

import anyio
from anyio.abc import TaskStatus

from kvatlas.addresses import is_loopback
from kvatlas.http.server import Listener, listen, serve
from kvatlas.runtime.descriptors import FEW, count_descriptors, most_requests
from kvatlas.settings import ProxySettings
from kvatlas.telemetry import export_metrics
from kvatlas_router.client_access import open_borders
from kvatlas_router.continuation.reasons import ContinueMode
from kvatlas_router.disaggregation.pair_booker import PairBooker
from kvatlas_router.engine_objects.object_holders import ObjectHolders
from kvatlas_router.held_bookings import HeldBookings
from kvatlas_router.proxy.answer_relay import AnswerRelay
from kvatlas_router.proxy.application import ProxyApplication
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.exchange import Exchange, ExchangeSettings
from kvatlas_router.proxy.request_router import build_admission, open_request_router
from kvatlas_router.proxy.route_api import RouteApi
from kvatlas_router.proxy.worker_attempts import WorkerAttempts
from kvatlas_router.status_page.prompt_probe import PromptProbe
from kvatlas_router.status_page.sections import router_page
from kvatlas_router.upstream.engine_client import EngineClient
from router_client.learning.condition import RequestEnds

CLOSE_S = 5.0
ENGINE_TIMEOUT_S = 600.0
"""An engine counts as gone after this time without a byte. Even the longest prompts take less time than this to
compute."""
CUT_S = 2.0
"""Time for answers that were cut off to send their errors."""

_log = logging.getLogger("kvatlas_router.proxy")


async def run_proxy(settings: ProxySettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled, then drain. `ready` is called once with the base URL, as soon as requests are accepted.

    Raises SettingsError for an address that can't be listened on or a tokenizer that can't be read, or Unreachable or
    LayoutMismatch if the store can't be used and `wait` is off.
    """
    access = settings.http
    if (most := most_requests()) < access.connections:
        # client connections must not use up the descriptors that connections to engines need
        access = replace(access, connections=most)
        level = logging.WARNING if most * 2 < FEW else logging.INFO
        _log.log(
            level,
            "at most %d client connections: this process may open %d file descriptors, and each request needs two; raise "
            "the limit (ulimit -n, LimitNOFILE=) for more",
            most,
            count_descriptors().most,
        )
    with ExitStack() as listeners:
        listener = listen(settings.host, settings.port, "the router", access, shared=settings.share_port)
        listeners.callback(listener.close)
        control: Listener | None = None
        if settings.control_is_apart:
            what = "the router's port for operators (--control-port)"
            control = listen(settings.control_host, settings.control_at, what, settings.control_http)
            listeners.callback(control.close)
            _log.info("operators' port (/kvatlas/*, /status, /metrics, /): %s", control.url)
        async with open_proxy(settings) as application, anyio.create_task_group() as tasks:
            application.connections = listener.shares
            serving = anyio.CancelScope(shield=True)  # when this process is cancelled, the server first drains
            watching = anyio.CancelScope(shield=True)  # the operators' server ends last, to show the draining

            async def serve_until_drained(*, task_status: TaskStatus[None]) -> None:
                grace_s = ceil(settings.grace_s + CUT_S)
                try:
                    with serving:
                        await serve(application.asgi, listener, grace_s=grace_s, task_status=task_status)
                finally:
                    watching.cancel()

            async def serve_operators(at: Listener, *, task_status: TaskStatus[None]) -> None:
                assert application.control is not None
                with watching:
                    await serve(application.control, at, task_status=task_status)

            if control is not None:
                await tasks.start(serve_operators, control)
            await tasks.start(serve_until_drained)
            if ready is not None:
                ready(listener.url)
            try:
                await anyio.sleep_forever()
            finally:
                await _drain(application, settings, serving)


async def _drain(application: ProxyApplication, settings: ProxySettings, serving: anyio.CancelScope) -> None:
    """Wait until no request is running, but no longer than the settings allow."""
    with anyio.CancelScope(shield=True):
        application.draining = True
        if settings.drain_s:
            _log.info("stopping: not ready; accepting requests for another %g s", settings.drain_s)
            await anyio.sleep(settings.drain_s)
        if application.feed is not None:
            application.feed.close()  # its followers would keep the server waiting
        serving.cancel()  # the server stops listening and waits for running requests
        if running := application.exchange.in_flight:
            _log.info("stopping: %d requests have up to %g s to finish", running, settings.grace_s)
        with anyio.move_on_after(settings.grace_s):
            await application.exchange.wait_until_idle()
        if cut := application.exchange.cut():
            _log.warning("stopping: %d requests still ran after %g s, and ended with an error", cut, settings.grace_s)


@asynccontextmanager
async def open_proxy(settings: ProxySettings) -> AsyncIterator[ProxyApplication]:
    """Open the application with all its parts. `kvatlas.http.server` serves it: no other server lets it know when a client
    disconnects (`ON_LEAVE`)."""
    stack = AsyncExitStack()
    try:
        parts = await stack.enter_async_context(
            open_request_router(settings, is_loopback(settings.host), settings.credentials_to)
        )
        engines = await stack.enter_async_context(EngineClient(parts.addresses, ENGINE_TIMEOUT_S))
        counters = ProxyCounters()
        parts.client.condition.ends = lambda: RequestEnds(
            counters.requests,
            counters.gave_up + counters.shed + counters.queue_full + counters.broken,
            counters.gone,
        )
        objects = ObjectHolders(parts.fleet, parts.catalogue.records)
        relay = AnswerRelay(
            engines,
            parts.progress,
            counters,
            parts.addresses,
            objects,
            ask_usage=settings.ask_usage,
            priorities=settings.engine_priority,
        )
        admission = build_admission(parts, settings, counters, apart=settings.disaggregate)
        stack.push_async_callback(admission.close)
        worker_attempts = WorkerAttempts(
            parts.catalogue,
            relay,
            parts.ejections,
            counters,
            admission,
            settings.max_attempts,
            ContinueMode(settings.continue_answers),
        )
        exchange = Exchange(
            parts.reader,
            parts.catalogue,
            objects,
            admission,
            worker_attempts,
            counters,
            ExchangeSettings(settings.access_log, settings.request_hints),
        )
        stack.enter_context(export_metrics("proxy_load", exchange))
        held = HeldBookings(parts.client, counters, held_s=settings.held_s, most_of_client=settings.held_requests)
        stack.push_async_callback(held.close)
        stack.enter_context(export_metrics("proxy", counters))
        decisions = {"auto": None, "always": True, "never": False}[settings.decision_header]
        borders = await stack.enter_async_context(
            open_borders(settings, parts.fleet, salts=settings.salt_is_tenant, decisions=decisions)
        )
        parts.client.condition.proves_tenants = borders.entrance is not None
        if borders.entrance is not None:
            parts.client.condition.limits_shared = lambda: borders.exchange.is_shared
        route_api = RouteApi(
            held, parts.client, parts.reader, parts.catalogue, parts.ejections, counters, shed=settings.shed
        )
        await parts.warm_up()
        pairs = PairBooker(parts.client, parts.catalogue.records, apart=settings.disaggregate)
        page = router_page(parts, exchange, PromptProbe(parts, pairs))
        yield ProxyApplication(
            parts,
            exchange,
            route_api,
            held,
            counters,
            page,
            cors_origins=settings.cors_origins,
            allow_paths=settings.allow_path,
            apart=settings.control_is_apart,
            borders=borders,
            feed=parts.client.feed if settings.record else None,
        )
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await stack.aclose()
