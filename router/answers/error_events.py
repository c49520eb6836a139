"""Reports an error in an event stream that has begun, in a form that makes clients of its protocol raise an error."""

import json
from collections.abc import Mapping
from typing import Any

from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.tokens.text_request import Api

_OPENAI = frozenset({Api.COMPLETIONS.value, Api.CHAT.value})


def error_event(path: str, body: Mapping[str, Any], events: int) -> bytes | None:
    """The last event of a stream that fails. `body`: the error from `error_body`, in the form of the path's API.
    `events`: the number of events already sent. None if the path's protocol is unknown: then only closing the connection
    shows every client that its answer is incomplete.

    OpenAI's clients raise an error if the data has a member `error`; Anthropic's do so only for an event of type
    `error`.
    """
    path = path.rstrip("/")
    named: Mapping[str, Any]
    if path in _OPENAI:
        return b"data: " + json.dumps(body).encode() + b"\n\n"
    if path == Api.MESSAGES:
        named = body
    elif path == Api.RESPONSES:
        error = body["error"]
        own = {name: error.get(name) for name in ("code", "message", "param")}
        named = {"type": "error", **own, "sequence_number": events, "error": error}
    else:
        return None
    return b"event: error\ndata: " + json.dumps(named).encode() + b"\n\n"


def is_seen(path: str, error: EngineError) -> bool:
    """True if the clients of this path's protocol raise an error when they receive this engine error as an event."""
    return error.named or path.rstrip("/") != Api.MESSAGES
