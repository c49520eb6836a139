"""Engines that fail in realistic ways, with one answer for each request; they count their requests."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvatlas.http.server import listen, serve
from tests.router.proxy.engines import MODEL

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class FaultyEngine:
    """`answer` gives the answer to every POST and may be changed; `models`: the models it lists; `key`: calls without it are
    refused."""

    answer: Answer
    url: str = ""
    models: list[str] = field(default_factory=lambda: [MODEL])
    adapters: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    key: str = ""

    @property
    def asked(self) -> int:
        """Number of requests that it got."""
        return len(self.requests)


@asynccontextmanager
async def faulty_engine(answer: Answer, *, healthy: bool = True) -> AsyncIterator[FaultyEngine]:
    """`healthy`: True if it answers its status page."""
    engine = FaultyEngine(answer)

    async def post(request: Request) -> Response:
        await request.body()
        engine.requests.append(request)
        engine.paths[request.url.path] += 1
        if engine.key and request.headers.get("authorization") != f"Bearer {engine.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await engine.answer(request)

    async def models(_: Request) -> Response:
        cards = [{"id": name, "object": "model", "parent": None} for name in engine.models]
        cards += [{"id": name, "object": "model", "parent": MODEL} for name in engine.adapters]
        return JSONResponse({"object": "list", "data": cards})

    async def health(_: Request) -> Response:
        if not healthy:
            await anyio.sleep_forever()
        return Response()

    application = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/{path:path}", post, methods=["GET", "POST", "DELETE"]),
        ]
    )
    listener = listen("127.0.0.1", 0, "the engine")
    engine.url = listener.url
    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, grace_s=0), application, listener)
        yield engine
        tasks.cancel_scope.cancel()


def status(code: int, **headers: str) -> Answer:
    """An answer that always has this status."""

    async def answer(_: Request) -> Response:
        body = {"error": {"message": f"status {code}", "type": "test", "param": None, "code": code}}
        return JSONResponse(body, code, {name.replace("_", "-"): value for name, value in headers.items()})

    return answer


async def well(request: Request) -> Response:
    """Answer with a short completion, or whatever the path asks for."""
    body = await request.body()
    asked = json.loads(body) if body[:1] == b"{" else {}
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
    if asked.get("stream"):
        event = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": usage}
        text = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        return Response(text, media_type="text/event-stream")
    return JSONResponse(
        {"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": "a"}], "usage": usage}
    )


def in_turn(*answers: Answer) -> Answer:
    """Gives these answers in turn, over and over."""
    turn = 0

    async def answer(request: Request) -> Response:
        nonlocal turn
        turn += 1
        return await answers[(turn - 1) % len(answers)](request)

    return answer
