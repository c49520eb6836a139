"""An engine that sends back what it receives: bodies of any kind and size, and the headers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.http.server import listen, serve

PIECE_BYTES = 300_000


@dataclass(slots=True)
class EchoEngine:
    """`requests`: the headers of each POST, and the length of its body."""

    url: str
    requests: list[tuple[dict[str, str], int]] = field(default_factory=list)


@asynccontextmanager
async def echo_engine(port: int, host: str = LOOPBACK) -> AsyncIterator[EchoEngine]:
    listener = listen(host, port, "the echo engine")
    engine = EchoEngine(listener.url)

    async def echo(request: Request) -> Response:
        body = await request.body()
        if request.method == "POST":
            engine.requests.append((dict(request.headers), len(body)))
        kind = request.headers.get("content-type", "application/octet-stream")
        if "chunked" not in request.query_params:
            return Response(body, media_type=kind)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), PIECE_BYTES):
                yield body[at : at + PIECE_BYTES]

        return StreamingResponse(pieces(), media_type=kind)

    routes = [Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"])]
    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, grace_s=1), Starlette(routes=routes), listener)
        yield engine
        tasks.cancel_scope.cancel()
