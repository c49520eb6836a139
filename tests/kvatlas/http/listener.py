"""A small application on an HTTP server, with raw connections to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
from anyio.abc import SocketStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvatlas.http.access import HttpAccess
from kvatlas.http.server import Listener, listen, serve

UNFINISHED = b"GET / HTTP/1.1\r\nx-a: b\r\n"
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def _echo_length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def _stream(_: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    return StreamingResponse(parts())


APPLICATION = Starlette(
    routes=[
        Route("/", _echo_length, methods=["GET", "POST", "OPTIONS"]),
        Route("/healthz", _echo_length),
        Route("/stream", _stream),
        Route("/v1/{rest:path}", _echo_length, methods=["POST"]),
    ]
)


@asynccontextmanager
async def serving(
    access: HttpAccess, grace_s: int = 0, application: Starlette = APPLICATION
) -> AsyncIterator[Listener]:
    listener = listen("127.0.0.1", 0, "the test", access)
    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, grace_s=grace_s), application, listener)
        yield listener
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(listener: Listener, own: str | None = None) -> AsyncIterator[SocketStream]:
    """`own`: the client's address."""
    async with await anyio.connect_tcp(*listener.socket.getsockname(), local_host=own) as stream:
        yield stream


async def read_to_end(stream: SocketStream) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with anyio.fail_after(60):
        try:
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return answer


def answers_in(received: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer; the parts of a chunked body are joined."""
    found = []
    for answer in received.split(b"HTTP/1.1 ")[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        parts = body.split(b"\r\n")[1::2] if b"transfer-encoding: chunked" in head else [body]
        found.append((int(head[:3]), b"".join(parts)))
    return found
