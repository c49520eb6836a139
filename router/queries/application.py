"""The paths of the index server. Nothing here changes the index.

/query, /query_by_hash        in the formats of Mooncake's conductor and Dynamo's indexer
/kvatlas/overlap              by text, token ids or hashes, with the tokens that each engine would reuse
/kvatlas/changes              the blocks held now and all changes to them, as server-sent events; can be resumed from a position
/workers                      in the format of Dynamo's indexer
/health, /ready, /version     for probes

For operators, on a separate port unless everything is on loopback: the same queries, for the tenant in the header
X-KVAtlas-Tenant, and /metrics, /status.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from kvatlas.errors import InvalidValue, KvatlasError, Unreachable
from kvatlas.runtime.certificate_files import certificates_in_use
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas.telemetry.metrics_page import METRICS_ROUTE
from kvatlas.version import own_version
from kvatlas_router.client_access import ClientBorders, caller_of
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.queries.api import QueryApi
from kvatlas_router.queries.changes.change import Change, position_text, read_position
from kvatlas_router.queries.changes.follow import PositionLost
from kvatlas_router.queries.counters import QueryCounters
from kvatlas_router.queries.question_body import read_question_body
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.refusals import ForeignTenant
from router_client.pricing.overlap import OverlapIndex, ReportsStatus

CHANGING = ("/register", "/unregister", "/register_peer", "/deregister_peer")
"""Paths through which other indexers can be changed. They are refused here."""

Answer = Callable[[dict[str, Any], Caller], Awaitable[Mapping[str, Any]]]
WhoAsks = Callable[[Request], Caller]


class IndexApplication:
    """`asgi` serves clients; `control` serves operators, None if they use the same port."""

    def __init__(
        self, api: QueryApi, catalogue: Catalogue, lookups: OverlapIndex, borders: ClientBorders, *, apart: bool
    ) -> None:
        self._api = api
        self._catalogue = catalogue
        self._lookups = lookups
        self._borders = borders
        probes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/readyz", self._ready),
            Route("/version", self._version),
        ]
        for_operators = [METRICS_ROUTE, Route("/status", self._status)]
        handlers = {HTTPException: _http_error}
        of_clients = self._questions(lambda request: caller_of(request.scope), borders.prove_again)
        own = Starlette(routes=[*probes, *of_clients, *([] if apart else for_operators)], exception_handlers=handlers)
        self.asgi: ASGIApp = borders.guard(own)
        of_operators = self._questions(lambda request: borders.caller_of_operator(request.scope))
        routes = [*probes, *of_operators, *for_operators]
        self.control = Starlette(routes=routes, exception_handlers=handlers) if apart else None

    def _questions(self, who: WhoAsks, prove: Callable[[Scope], Awaitable[Caller]] | None = None) -> list[Route]:
        api = self._api

        async def workers(request: Request) -> Response:
            asked = request.query_params
            found = await api.workers(asked.get("model_name"), asked.get("routing_group"), who(request))
            return JSONResponse(list(found))

        async def changes(request: Request) -> Response:
            given = request.headers.get("last-event-id") or request.query_params.get("after") or ""
            again = None if prove is None else partial(prove, request.scope)
            found = api.follow(who(request), read_position(given) if given else None, again)
            first = await anext(found)  # raises errors before the answer has a status
            return StreamingResponse(_as_events(first, found), media_type="text/event-stream")

        counted = api.counters

        return [
            Route("/query", _with_errors(counted, _posted(api.query, who)), methods=["POST"]),
            Route("/query_by_hash", _with_errors(counted, _posted(api.query_by_hash, who)), methods=["POST"]),
            Route("/kvatlas/overlap", _with_errors(counted, _posted(api.overlap, who)), methods=["POST"]),
            Route("/workers", _with_errors(counted, workers), methods=["GET"]),
            Route("/kvatlas/changes", _with_errors(counted, changes), methods=["GET"]),
            *(Route(path, _refuse_change, methods=["POST"]) for path in CHANGING),
        ]

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        try:
            workers = len(await self._catalogue.records())
        except Unreachable:
            return JSONResponse({"workers": 0}, 503)
        return JSONResponse({"workers": workers})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": own_version(), "server": "kvatlas index-server"})

    async def _status(self, _: Request) -> Response:
        replica = self._lookups.status() if isinstance(self._lookups, ReportsStatus) else None
        tenancy = self._borders.status(self._catalogue.tenant_id)
        return JSONResponse({"replica": replica, "certificates": certificates_in_use(), "tenancy": tenancy})


async def _as_events(first: Change | None, rest: AsyncGenerator[Change | None, None]) -> AsyncIterator[bytes]:
    """Convert changes to server-sent events, with comments while nothing happens, so that a lost client is noticed."""
    async with aclosing(rest):
        yield _event(first)
        with suppress(KvatlasError, *STORE_FAILURES):  # the client reconnects with its position
            async for change in rest:
                yield _event(change)


def _event(change: Change | None) -> bytes:
    if change is None:
        return b":\n\n"
    id = "" if change.position is None else f"id: {position_text(change.position)}\n"
    return f"{id}event: {change.kind}\ndata: {json.dumps(change.data)}\n\n".encode()


def _posted(answer: Answer, who: WhoAsks) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        caller = who(request)
        return JSONResponse(await answer(await read_question_body(await request.body()), caller))

    return handle


def _with_errors(
    counters: QueryCounters, handle: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that its calls are counted and its errors become `{"error": line}`, as in other indexers."""

    async def handled(request: Request) -> Response:
        try:
            with counters.question():
                return await handle(request)
        except ClientDisconnect:
            return Response(status_code=408)  # the client no longer receives anything
        except InvalidValue as error:
            return _error(400, str(error))
        except ForeignTenant as error:
            return _error(403, str(error))
        except UnknownModel as error:
            return _error(404, str(error))
        except PositionLost as error:
            return _error(410, str(error))
        except KvatlasError as error:
            return _error(503, str(error))

    return handled


async def _refuse_change(request: Request) -> Response:
    line = "this index is read-only; engines are followed by `kvatlas publish`"
    return _error(405, f"{request.url.path}: {line}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method[:20]} {request.scope['path'][:200]}: {error.detail}")


def _error(status: int, line: str) -> Response:
    return JSONResponse({"error": line}, status, {"Retry-After": "1"} if status == 503 else {})
