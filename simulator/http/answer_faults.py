"""Broken answers with status 200, as engines send them when something behind their HTTP server fails."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

_ERROR = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
"""vLLM 0.33's error for an engine core that died."""
_ERROR_EVENTS = b"data: " + json.dumps(_ERROR, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"


class AnswerFault(StrEnum):
    """`ERROR`: an error instead of an answer, in a stream as an event. The others come after a part of a stream. `LATE_ERROR`:
    the same error. `CUT`: the connection closes. `HANG`: nothing computes any more. `KILL`: the engine's process is killed. A
    non-streamed answer is an error in all cases."""

    NONE = "none"
    ERROR = "error"
    LATE_ERROR = "late_error"
    CUT = "cut"
    HANG = "hang"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class AnswerFaults:
    """The fault of the answers, the share of answers that have it, and how many events of a stream come first."""

    fault: AnswerFault = AnswerFault.NONE
    share: float = 1.0
    after: int = 1
    _random: random.Random = field(default_factory=random.Random, compare=False)

    def draw(self) -> AnswerFault:
        """The fault of the next answer."""
        return self.fault if self._random.random() < self.share else AnswerFault.NONE

    def apply(self, fault: AnswerFault, response: Response, hang: Callable[[], None], *, streamed: bool) -> Response:
        """The response with this fault. `hang`: lets the engine compute nothing from then on."""
        if not streamed:
            return JSONResponse(_ERROR)
        return _FaultyStream(response, fault, 0 if fault is AnswerFault.ERROR else self.after, hang)


class _FaultyStream(Response):
    """Sends a response's first events, then what the fault does. The response sends one event at a time."""

    def __init__(self, response: Response, fault: AnswerFault, after: int, hang: Callable[[], None]) -> None:
        super().__init__()
        self._response = response
        self._fault = fault
        self._after = after
        self._hang = hang

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = 0
        failed = asyncio.Event()

        async def send_first(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                if sent >= self._after:
                    failed.set()
                    await asyncio.Event().wait()
                sent += 1
            await send(message)

        answering = asyncio.ensure_future(self._response(scope, receive, send_first))
        failing = asyncio.ensure_future(failed.wait())
        try:
            await asyncio.wait((answering, failing), return_when=asyncio.FIRST_COMPLETED)
            if failed.is_set():
                await self._fail(send, answering)
        finally:
            failing.cancel()
            answering.cancel()
            await asyncio.gather(answering, failing, return_exceptions=True)

    async def _fail(self, send: Send, answering: "asyncio.Future[None]") -> None:
        if self._fault is AnswerFault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault is AnswerFault.HANG:
            self._hang()
            await asyncio.wait((answering,))  # until its client leaves
        if self._fault in (AnswerFault.ERROR, AnswerFault.LATE_ERROR):
            await send({"type": "http.response.body", "body": _ERROR_EVENTS, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        # otherwise the server closes the connection
