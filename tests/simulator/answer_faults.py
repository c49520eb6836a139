"""Broken answers with status 200, as engines send them when something behind their HTTP server fails."""

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass

import httpx
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvatlas_router.tokens import Api

_ERROR = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
"""vLLM 0.33's error after its engine core has died."""
_ERROR_EVENTS = b"data: " + json.dumps(_ERROR, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerFaults:
    """Wraps an engine's application (`run_engine`). `fault` affects this share of the answers, after this many events of a
    stream:

    error: an error instead of an answer, in a stream as an event. All other faults come after a part of a stream. late_error:
    the same error. cut: the connection closes. hang: nothing computes any more. kill: the engine's process is killed. A
    non-streamed answer is an error in all cases.
    """

    fault: str
    after: int = 1
    share: float = 1.0

    def __call__(self, application: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] in set(Api) and random.random() < self.share:
                await self._answer(application, scope, receive, send)
            else:
                await application(scope, receive, send)

        return answer

    async def _answer(self, application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        left = 0 if self.fault == "error" else self.after
        started = False
        failed = asyncio.Event()

        async def send_first(message: Message) -> None:
            nonlocal left, started
            if message["type"] == "http.response.start":
                is_stream = dict(message["headers"])[b"content-type"].startswith(b"text/event-stream")
                fails = message["status"] == 200 and not is_stream
            else:
                fails, left = left == 0, left - 1
            if fails:
                failed.set()
                await asyncio.Event().wait()
            started = True
            await send(message)

        answering = asyncio.ensure_future(application(scope, receive, send_first))
        failing = asyncio.ensure_future(failed.wait())
        try:
            await asyncio.wait((answering, failing), return_when=asyncio.FIRST_COMPLETED)
            if failed.is_set() and not started:
                await JSONResponse(_ERROR)(scope, receive, send)
            elif failed.is_set():
                await self._fail(application, send, answering)
        finally:
            failing.cancel()
            answering.cancel()
            await asyncio.gather(answering, failing, return_exceptions=True)

    async def _fail(self, application: ASGIApp, send: Send, answering: "asyncio.Future[None]") -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(application), base_url="http://engine"
            ) as client:
                await client.post("/hang")
            await asyncio.wait((answering,))  # until its client disconnects
        if self.fault in ("error", "late_error"):
            await send({"type": "http.response.body", "body": _ERROR_EVENTS, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        # otherwise the server closes the connection
