"""The status page of a publisher process: `/healthz`, `/readyz` and `/status` (JSON), for people and for Kubernetes' probes.

`POST /clear` drops all known blocks: for who resets the engine's prefix cache or updates its weights.
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from publishers.publisher import Publisher


def application(published: Sequence[Publisher], workers: int) -> Starlette:
    """`published` grows until every one of the process' `workers` is published."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if len(published) == workers:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"not ready: {len(published)} of {workers} workers are published\n", status_code=503)

    async def status(_: Request) -> Response:
        return JSONResponse({"workers": [publisher.status() for publisher in published]})

    async def clear(_: Request) -> Response:
        for publisher in published:
            publisher.clear()
        return PlainTextResponse(f"{len(published)} workers: all known blocks are dropped\n")

    gets = (("/healthz", healthz), ("/readyz", readyz), ("/status", status))
    return Starlette(routes=[*(Route(path, page) for path, page in gets), Route("/clear", clear, methods=["POST"])])
