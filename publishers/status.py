"""The HTTP server of a publisher process: a human-readable page; `/healthz`, `/readyz`, `/status` (JSON), `/metrics` for
probes and scripts.

`POST /clear` drops all known blocks; call it after resetting the engine's prefix cache or updating its weights. `POST /events`
takes a batch of the open event forms, JSON or msgpack, for the worker named by `?worker=`, or for the only one.
"""

from collections.abc import Mapping, Sequence
from secrets import token_hex

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvatlas.errors import EngineEventError
from kvatlas.runtime.certificate_files import certificates_in_use
from kvatlas.telemetry.metrics_page import METRICS_ROUTE
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sources.open_engine import OpenEngine
from kvatlas_publishers.status_page import status_page


def application(
    published: Sequence[Publisher], workers: int, takers: Mapping[str, OpenEngine] | None = None
) -> Starlette:
    """`published` grows until all of the process's `workers` are published. `takers`: the engines that accept batches
    here, by worker."""
    life = token_hex(8)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if len(published) == workers:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"not ready: {len(published)} of {workers} workers are published\n", status_code=503)

    async def status(_: Request) -> Response:
        workers = [publisher.status() for publisher in published]
        return JSONResponse({"workers": workers, "certificates": certificates_in_use()})

    async def clear(_: Request) -> Response:
        for publisher in published:
            publisher.clear()
        return PlainTextResponse(f"{len(published)} workers: all known blocks are dropped\n")

    async def events(request: Request) -> Response:
        takes = takers or {}
        named = request.query_params.get("worker") or (next(iter(takes)) if len(takes) == 1 else "")
        if named not in takes:
            expected = f"?worker= with one of {', '.join(takes)}" if takes else "a publisher with --engine open"
            return JSONResponse({"error": f"no worker {named!r:.80} takes events here; expected {expected}"}, 404)
        if all(publisher.worker_id != named for publisher in published):
            return JSONResponse({"error": f"worker {named} is not published yet"}, 503, {"retry-after": "1"})
        try:
            batch = takes[named].take(await request.body())
        except EngineEventError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answer = {"worker": named, "publisher": life, "events": len(batch.events), "skipped": list(batch.skipped)}
        return JSONResponse(answer)

    gets = (("/healthz", healthz), ("/readyz", readyz), ("/status", status))
    posts = (("/clear", clear), ("/events", events))
    return Starlette(
        routes=[
            *status_page(published, workers).routes,
            *(Route(path, page) for path, page in gets),
            METRICS_ROUTE,
            *(Route(path, page, methods=["POST"]) for path, page in posts),
        ]
    )
