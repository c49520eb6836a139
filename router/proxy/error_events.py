"""How a stream of events that has begun reports an error, in the words of its protocol: so that its clients raise it."""

import json
from collections.abc import Mapping
from typing import Any

from kvatlas_router.tokens.text_request import Api

_OPENAI = frozenset({Api.COMPLETIONS.value, Api.CHAT.value})


def error_event(path: str, body: Mapping[str, Any], events: int) -> bytes | None:
    """The last event of a stream. `body`: the error as `error_body` makes it. `events`: how many have been sent before it. None
    for a path whose protocol is not known: only a connection that is cut says to every client that its answer is not whole.

    OpenAI's clients raise an error for data with a member `error`, Anthropic's for an event of type `error` alone.
    """
    path = path.rstrip("/")
    error = body["error"]
    if path in _OPENAI:
        return b"data: " + json.dumps(body).encode() + b"\n\n"
    if path == Api.MESSAGES:
        named: dict[str, Any] = {"type": "error", "error": {"type": "api_error", "message": error["message"]}}
    elif path == Api.RESPONSES:
        own = {name: error.get(name) for name in ("code", "message", "param")}
        named = {"type": "error", **own, "sequence_number": events, "error": error}
    else:
        return None
    return b"event: error\ndata: " + json.dumps(named).encode() + b"\n\n"
