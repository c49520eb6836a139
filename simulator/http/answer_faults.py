"""Broken answers with status 200, as engines send them when something behind their HTTP server fails."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

_ERROR = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
"""vLLM 0.33's error for an engine core that died."""


class AnswerFault(StrEnum):
    """`ERROR`: an error instead of an answer, in a stream as an event. `LATE_ERROR`: the same after the first part of a
    stream. `CUT`: the connection closes after the first part. A non-streamed answer is an error in all cases."""

    NONE = "none"
    ERROR = "error"
    LATE_ERROR = "late_error"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class AnswerFaults:
    """The fault of the answers, and the share of answers that have it."""

    fault: AnswerFault = AnswerFault.NONE
    share: float = 1.0
    _random: random.Random = field(default_factory=random.Random, compare=False)

    def draw(self) -> AnswerFault:
        """The fault of the next answer."""
        return self.fault if self._random.random() < self.share else AnswerFault.NONE


def faulty_response(fault: AnswerFault, first: Mapping[str, Any], *, streamed: bool) -> Response:
    """A response with this fault. `first`: the first part of the answer."""
    if not streamed:
        return JSONResponse(_ERROR)
    begin = [] if fault is AnswerFault.ERROR else [_event(first)]
    return _FaultyStream([*begin, *([] if fault is AnswerFault.CUT else [_event(_ERROR), b"data: [DONE]\n\n"])], fault)


class _FaultyStream(Response):
    def __init__(self, parts: list[bytes], fault: AnswerFault) -> None:
        super().__init__()
        self._parts = parts
        self._ends = fault is not AnswerFault.CUT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if self._ends:  # otherwise the server closes the connection
            await send({"type": "http.response.body", "body": b""})


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
