"""The proxy's paths. Those in `INFERENCE` go to a worker of the model that the request names; others get a 404.

/v1/models, /v1/models/{name}         the fleet's models
/health, /ready (/readyz), /version   for probes

For operators, on a separate port unless everything is on loopback:

/kvatlas/route, /kvatlas/done         the proxy's choice, for routers in other languages
/kvatlas/select                       the choice in the terms of the router protocol, without a booking
/kvatlas/requests                     a stream of answered requests, for `kvatlas record` (--record)
/metrics                              for Prometheus
/status                               counters and findings as JSON
/                                     a status page: workers, decisions, a probe
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.http.guard import ON_LEAVE
from kvatlas.runtime.certificate_files import certificates_in_use
from kvatlas.status_page.server import StatusPage
from kvatlas.telemetry.distribution import counters_to_jsonable
from kvatlas.telemetry.metrics_page import METRICS_ROUTE
from kvatlas.version import own_version
from kvatlas_router.admission.admission import RequestShed
from kvatlas_router.client_access import ClientBorders, caller_of
from kvatlas_router.ejection.avoidance import EnginesRest
from kvatlas_router.engine_objects.object_use import OBJECT_ROUTES
from kvatlas_router.held_bookings import HeldBookings, TooManyHeld
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind, error_body, send_error
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.engine_call import INFERENCE, is_ambiguous, read_call, read_type
from kvatlas_router.proxy.exchange import Exchange
from kvatlas_router.proxy.headers import DECISION_HEADER, plain_json_type
from kvatlas_router.proxy.json_body import read_object
from kvatlas_router.proxy.request_router import RequestRouter
from kvatlas_router.proxy.request_trace import describe_answer, request_span
from kvatlas_router.proxy.route_api import RouteApi
from kvatlas_router.tenant_gate import permit_of
from kvatlas_router.upstream.engine_answer import EngineRequest
from router_client.errors import NoWorkers
from router_client.request_feed import RequestFeed

_HTTP_KINDS = (ErrorKind.METHOD, ErrorKind.TOO_LONG)
_METHODS = frozenset({"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"})
"""Methods that are passed on to engines. OPTIONS is not passed on: browsers send no key with it, so it proves
nothing."""


class Connections(Protocol):
    """Clients' connections. `is_nearly_full`: new connections will soon be refused."""

    @property
    def is_nearly_full(self) -> bool: ...


class ProxyApplication:
    """The routes over one proxy's parts. `asgi` is the application; `control`, if separate, is the application for operators.
    `draining`: the server is about to stop; it is not ready, but still answers requests. `connections`: the server's
    connections; it is not ready while nearly all of them are in use."""

    def __init__(
        self,
        parts: RequestRouter,
        exchange: Exchange,
        route_api: RouteApi,
        held: HeldBookings,
        counters: ProxyCounters,
        page: StatusPage,
        *,
        cors_origins: Sequence[str] = (),
        allow_paths: Sequence[str] = (),
        apart: bool = False,
        borders: ClientBorders | None = None,
        feed: RequestFeed | None = None,
    ) -> None:
        """`page`: the status page. `cors_origins`: origins of pages that may use the proxy; `*` for all. `allow_paths`: paths
        passed to engines with any method; a trailing `*` makes it a prefix. `apart`: only `control` serves the operators'
        paths. `borders`: what clients must prove, and what they may see. `feed`: follows answered requests."""
        self.draining = False
        self.connections: Connections | None = None
        self._parts = parts
        self._is_warm = False
        self.exchange = exchange
        self.held = held
        self.feed = feed
        self._counters = counters
        middleware = [
            Middleware(
                CORSMiddleware,
                allow_origins=cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[DECISION_HEADER],
            )
        ]
        probes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/readyz", self._ready),
            Route("/version", self._version),
        ]
        self._borders = borders = borders or ClientBorders()
        for_engines = _ForEngines(exchange, borders)
        for_operators = [
            Route("/kvatlas/route", _with_json_errors(route_api.route, borders), methods=["POST"]),
            Route("/kvatlas/select", _with_json_errors(route_api.select, borders), methods=["POST"]),
            Route("/kvatlas/done", _with_json_errors(route_api.done, borders), methods=["POST"]),
            *([Route("/kvatlas/requests", self._requests)] if feed is not None else []),
            METRICS_ROUTE,
            Route("/status", self._status),
            *page.routes,
        ]
        own = Starlette(
            routes=[
                Route("/v1/models", _with_json_errors(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", _with_json_errors(self._model), methods=["GET"]),
                *probes,
                *([] if apart else for_operators),
                *(Route(path, for_engines, methods=["POST"]) for path in sorted(INFERENCE)),
                *(Route(path, for_engines) for path in OBJECT_ROUTES),
                *(Route(_pattern(path), for_engines) for path in allow_paths),
            ],
            middleware=middleware if cors_origins else [],
            exception_handlers={HTTPException: _http_error},
        )
        self.asgi: ASGIApp = borders.guard(own if cors_origins else _InferenceFirst(for_engines, own))
        handlers = {HTTPException: _http_error}
        self.control = Starlette(routes=[*probes, *for_operators], exception_handlers=handlers) if apart else None

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        workers = await self._parts.catalogue.routable()
        if workers and not self._is_warm:  # workers may appear after the start
            self._is_warm = True
            await self._parts.warm_up()
        full = self.connections is not None and self.connections.is_nearly_full
        ready = workers > 0 and not self.draining and not full
        state = {"workers": workers, "draining": self.draining, "full": full}
        return JSONResponse(state, status_code=200 if ready else 503)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": own_version(), "server": "kvatlas router"})

    async def _requests(self, _: Request) -> Response:
        """Stream requests answered from now on, as JSON lines."""
        assert self.feed is not None
        return StreamingResponse(self.feed.follow(), media_type="application/jsonl")

    async def _models(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        listed = await self._parts.catalogue.cards(seen_by=caller.tenant_id)
        cards = [card for card in listed if caller.may_use(card["id"])]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            return RedirectResponse(request.url.path.rstrip("/"))  # as for every other path with a trailing slash
        caller = caller_of(request.scope)
        card = await self._parts.catalogue.card(name, seen_by=caller.tenant_id) if caller.may_use(name) else None
        if card is None:
            raise UnknownModel(f"the model {name[:200]!r} does not exist; /v1/models lists those that do")
        return JSONResponse(card)

    async def _status(self, _: Request) -> Response:
        """Return counters, and findings that need attention."""
        client, ejections, tokens = self._parts.client, self._parts.ejections, self._parts.tokens
        ejected = {id: max(0.0, round(left, 3)) for id, left in ejections.ejected().items()}
        findings = [f"worker {id} is ejected: it fails while others answer" for id in ejected]
        progress = self._parts.progress
        return JSONResponse(
            {
                "workers": await self._parts.catalogue.routable(),
                "draining": self.draining,
                "in_flight": self.exchange.in_flight,
                "waiting": self.exchange.waiting,
                "pool_waiting": self.exchange.pool_waiting,
                "held": len(self.held),
                "ejected": ejected,
                "stalled": {id: round(seconds, 3) for id, seconds in progress.stalled().items()},
                "proxy": counters_to_jsonable(self._counters),
                "outliers": asdict(ejections.counters),
                "progress": asdict(progress.counters),
                "tokens": counters_to_jsonable(tokens),
                "answers": asdict(client.answers.counts),
                "replica": client.replica_status,
                "certificates": certificates_in_use(),
                "tenancy": self._borders.status(self._parts.catalogue.tenant_id),
                "condition": client.condition.read().model_dump(mode="json"),
                "findings": [*findings, *progress.findings(), *client.answers.findings(), *tokens.findings()],
            }
        )


class _InferenceFirst:
    """Passes on calls to engines without searching all routes, since the search would take longer than reading the
    request."""

    def __init__(self, for_engines: "_ForEngines", others: ASGIApp) -> None:
        self._for_engines = for_engines
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in INFERENCE or scope["method"] != "POST":
            await self._others(scope, receive, send)
            return
        try:
            await self._for_engines(scope, receive, send)
        except HTTPException as error:  # errors of the body, before the answer has begun
            answer = await _http_error(Request(scope), error)
            await answer(scope, receive, send)


class _ForEngines:
    """The ASGI application for calls to engines. Passes answers on as they arrive."""

    def __init__(self, exchange: Exchange, borders: ClientBorders) -> None:
        self._exchange = exchange
        self._borders = borders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope["path"], scope["query_string"]
        if path not in INFERENCE and scope["method"] not in _METHODS:
            line = f"{scope['method'][:20]} {path[:200]}: this method is not passed on to engines"
            await send_error(send, path, ErrorKind.METHOD, line)
            return
        if path not in INFERENCE and (path.endswith("/") or is_ambiguous(path)):
            line = f"{path[:200]}: expected a path without empty or dotted parts and control characters"
            await send_error(send, path, ErrorKind.NO_PATH, line)
            return
        try:
            kind = read_type(scope["headers"])
            body = await _read_body(receive)
            caller = caller_of(scope)
            call = await read_call(scope["method"], path, query, kind, body, of_tenant=caller.is_proven)
            if self._borders.salts and caller.is_proven:
                call = call.salted(path, caller.salted)
        except InvalidValue as error:
            await send_error(send, path, ErrorKind.INVALID, str(error))
            return
        except ClientDisconnect:
            return
        sent_path = path if path in INFERENCE else scope["raw_path"].decode("ascii")
        for_engine = EngineRequest(scope["method"], sent_path, query, call.body)
        headers = plain_json_type(scope["headers"])
        asked = ClientRequest(call.text, call.model, call.letters, for_engine, headers, scope[ON_LEAVE], send)
        asked.permit, asked.priority = permit_of(scope), caller.priority
        asked.shows_decision = self._borders.shows_decision(caller)
        asked.shows_cached = self._borders.shows_cached(caller)
        await self._exchange.run(asked)


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises ClientDisconnect."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _pattern(path: str) -> str:
    return path.removesuffix("*") + "{rest:path}" if path.endswith("*") else path


def _with_json_errors(
    handle: Callable[..., Awaitable[Any]], borders: ClientBorders | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that each of its errors becomes a one-line JSON error. A POST handler gets the body's JSON object and
    the caller, and returns a JSON object."""

    async def handled(request: Request) -> Response:
        with request_span(request.url.path, request.headers.raw, method=request.method) as span:
            response = await answer(request)
            describe_answer(span, response.status_code, None)
            return response

    async def answer(request: Request) -> Response:
        retry_after_s = 1
        try:
            if request.method == "POST" and borders is not None:
                asks = borders.caller_of_operator(request.scope)
                return JSONResponse(await handle(read_object(await request.body())[0], asks))
            response: Response = await handle(request)
            return response
        except ClientDisconnect:
            return Response(status_code=408)  # the client no longer receives anything
        except InvalidValue as error:
            kind, line = ErrorKind.INVALID, str(error)
        except UnknownModel as error:
            kind, line = ErrorKind.NO_MODEL, str(error)
        except EnginesRest as error:
            kind, line, retry_after_s = ErrorKind.BUSY, str(error), error.retry_after_s
        except RequestShed as error:
            kind, line, retry_after_s = ErrorKind.UNAVAILABLE, str(error), error.retry_after_s
        except (NoWorkers, Unreachable, TooManyHeld) as error:
            kind, line = ErrorKind.UNAVAILABLE, str(error)
        headers = {} if kind.status < 429 else {"Retry-After": str(retry_after_s)}
        return JSONResponse(error_body(request.url.path, kind, line), kind.status, headers)

    return handled


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer for one of the server's own errors, such as a wrong method or a body that is too long."""
    assert isinstance(error, HTTPException)
    kind = next((kind for kind in _HTTP_KINDS if kind.status == error.status_code), ErrorKind.NO_PATH)
    detail = "no path of this router (see --allow-path)" if kind is ErrorKind.NO_PATH else error.detail
    path = request.scope["path"]
    line = f"{request.method[:20]} {path[:200]}: {detail}"
    return JSONResponse(error_body(path, kind, line), error.status_code, dict(error.headers or {}))
