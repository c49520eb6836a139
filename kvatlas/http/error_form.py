"""Errors as JSON, in the form used by the API that a path belongs to: Anthropic's or OpenAI's."""

from collections.abc import Mapping
from typing import Any

_ANTHROPICS = "/v1/messages"
_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_form(
    path: str, status: int, line: str, *, code: str | None = None, param: str | None = None
) -> Mapping[str, Any]:
    """The JSON object of an error. `code` and `param` belong to OpenAI's API; Anthropic's has neither."""
    if path.startswith(_ANTHROPICS):
        kind = _ANTHROPICS_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": line}}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}
