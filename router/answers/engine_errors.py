"""Errors inside an answer with status 200, either as an event of its stream or as its whole JSON body."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvatlas.runtime.json_text import decode

_ERROR = b'"error"'
_MARKS = (b'"response.failed"', b'"abort"')
"""Every JSON error contains `_ERROR` or one of these. Inside generated text the quotes would be escaped."""
_NULL = re.compile(rb'"error"\s*:\s*null')

_STATUS_OF_TYPE = {
    "badrequesterror": 400,
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "notfounderror": 404,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "serviceunavailableerror": 503,
    "overloaded_error": 503,
}
"""Statuses of the error types of OpenAI, Anthropic, vLLM and SGLang (in lower case), for errors without a code."""
UNKNOWN_STATUS = 502
MOST_LINE = 200


@dataclass(frozen=True, slots=True)
class EngineError:
    """`status`: the HTTP status that the error stands for. `line`: its message. `body`: its JSON, as the engine wrote it.
    `named`: whether it is an event of type `error`."""

    status: int
    line: str
    body: bytes
    named: bool = False

    @classmethod
    def of_event(cls, type: str, data: bytes) -> Self | None:
        """The error that an event's type and data report; None if the event is not an error."""
        named = type.strip().lower() == "error"
        found = cls.of_body(data)
        if found is None and named:
            line = data.decode("utf-8", "replace")
            body = json.dumps({"error": {"message": line, "type": "server_error", "param": None, "code": None}})
            return cls(UNKNOWN_STATUS, line[:MOST_LINE], body.encode(), named)
        return replace(found, named=named) if found is not None and named else found

    @classmethod
    def of_body(cls, body: bytes) -> Self | None:
        """The error in a JSON text; None if it is not JSON, or not an error."""
        if body.count(_ERROR) == len(_NULL.findall(body)) and not any(mark in body for mark in _MARKS):
            return None
        try:
            decoded = decode(body)
        except ValueError:
            return None
        if not isinstance(decoded, dict) or decoded.get("choices"):
            return None
        error = _error_in(decoded)
        if error is None:
            return None
        fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
        line = str(fields.get("message") or fields.get("type") or "an error without a message")
        return cls(_status_of(fields), line[:MOST_LINE], body)


def _error_in(decoded: Mapping[str, Any]) -> Any:
    """The error object or error text in an answer; None if there is none."""
    if decoded.get("type") == "response.failed" and isinstance(response := decoded.get("response"), Mapping):
        return response.get("error") or {"message": "the response failed"}
    if (aborted := _abort_in(decoded)) is not None:
        return aborted
    if error := decoded.get("error"):
        return error if isinstance(error, (Mapping, str)) else None
    return decoded if "error" in (decoded.get("object"), decoded.get("type")) else None


def _abort_in(decoded: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The abort that ends a stream of SGLang's `/generate` if the engine fails. An abort without a status means that the
    client ended the request."""
    meta = decoded.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    if isinstance(reason, Mapping) and reason.get("type") == "abort" and isinstance(reason.get("status_code"), int):
        return reason
    return None


def _status_of(fields: Mapping[str, Any]) -> int:
    for name in ("code", "status_code", "status"):
        value = fields.get(name)
        text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
        if len(text) == 3 and text.isascii() and text.isdigit() and 400 <= int(text) < 600:
            return int(text)
        if (known := _STATUS_OF_TYPE.get(text.lower())) is not None:
            return known
    return _STATUS_OF_TYPE.get(str(fields.get("type")).lower(), UNKNOWN_STATUS)
