"""The checks between a connection and an application; `bounded_protocol` reads the requests.

`HttpBorder` refuses requests with several Hosts (or none, in HTTP/1.1), bodies that are too long, and WebSockets. Except for
probes, it also refuses requests without a token or, if the server has no tokens, requests from web pages.
"""

import hmac
import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvatlas.http.access import MOST_HEADER_BYTES, PROBES, HttpAccess, keys_in
from kvatlas.http.counters import HttpCounters
from kvatlas.http.error_form import error_form
from kvatlas.runtime.rate_limited_log import RateLimitedLog

CERTIFICATE = "kvatlas.certificate"
"""Key in a request's scope: the names in the client's certificate, as a frozenset."""
PROVEN = "kvatlas.proven"
"""Key in a request's scope: the server's token that the request carries, in bytes."""
ON_LEAVE = "kvatlas.on_leave"
"""Key in a request's scope: a callable that takes a function to be called if the client disconnects before the end of the
answer. This is cheaper than a task that waits for the disconnect."""
TOO_MANY = "too many connections are open; try again later"
_CODES = {401: "invalid_api_key"}
"""Error codes, as in OpenAI's API."""


class BodyTooLong(HTTPException):
    """Raised by an application's `receive`; Starlette answers with a 413."""

    def __init__(self, length: str, limit: int) -> None:
        super().__init__(413, f"the body has {length} bytes; expected at most {limit}")


def bounded_body(receive: Receive, announced: int, limit: int, on_too_long: Callable[[BodyTooLong], None]) -> Receive:
    """Wrap `receive` so that it raises BodyTooLong after `limit` bytes, or immediately if more are `announced` (Content-Length;
    0: unknown). `on_too_long` is called first."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        if announced <= limit:
            message = await receive()
            received += len(message.get("body", b""))
            if received <= limit:
                return message
        error = BodyTooLong(str(announced) if announced else f"more than {limit}", limit)
        on_too_long(error)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, a cycle that would keep the connection alive

    return bounded


class HttpBorder:
    """An ASGI application in front of another one, which passes on only those requests that are allowed."""

    def __init__(
        self,
        application: ASGIApp,
        access: HttpAccess,
        counters: HttpCounters,
        refusals: RateLimitedLog,
        *,
        near: bool = False,
    ) -> None:
        """`near`: the server listens on loopback."""
        self._near = near
        self._application = application
        self._access = access
        self._counters = counters
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listed: list[tuple[bytes, bytes]] = scope["headers"]
        headers = dict(listed)
        head_bytes = len(scope["raw_path"]) + sum(map(len, chain.from_iterable(listed)))
        hosts = int(b"host" in headers)
        if len(headers) < len(listed):
            hosts = sum(name == b"host" for name, _ in listed)
        if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):  # RFC 9112, 3.2
            self._counters.framing += 1
            line = f"the request has {hosts} Host headers; expected one"
            await self._refuse(scope, send, 400, line, (b"connection", b"close"))
        elif head_bytes > MOST_HEADER_BYTES:  # they arrived in one piece, so the protocol did not check their length
            self._counters.headers += 1
            line = f"the headers are longer than {MOST_HEADER_BYTES} bytes, which is the limit"
            await self._refuse(scope, send, 431, line, (b"connection", b"close"))
        elif headers.get(b"upgrade", b"").lower() == b"websocket":
            self._counters.upgrade += 1
            line = 'WebSockets are not supported; send plain HTTP requests, streamed with `"stream": true`'
            await self._refuse(scope, send, 400, line, (b"connection", b"close"))
        elif scope["path"] not in PROBES and (
            why := self._access.why_foreign(scope["method"], headers, near=self._near)
        ):
            self._counters.denied += 1
            await self._refuse(scope, send, 403, why, (b"connection", b"close"))
        elif not self._is_allowed(scope):
            self._counters.denied += 1
            line = "no valid token; send `Authorization: Bearer TOKEN`"
            await self._refuse(scope, send, 401, line, (b"www-authenticate", b"Bearer"))
        else:
            refuse = partial(self._record_too_long, scope)
            bounded = bounded_body(receive, int(headers.get(b"content-length", 0)), self._access.body_bytes, refuse)
            await self._application(scope, bounded, send)

    def _is_allowed(self, scope: Scope) -> bool:
        """True if the request has a valid token (`PROVEN`) or needs none. Browsers don't send a token with OPTIONS."""
        if not self._access.tokens or scope["path"] in PROBES or scope["method"] == "OPTIONS":
            return True
        # compare with all of them, each in constant time, so that the duration reveals nothing about any token
        shown = keys_in(scope["headers"])
        matched = [one for one in self._access.tokens for key in shown if hmac.compare_digest(key, one)]
        if matched:
            scope[PROVEN] = matched[0]
        return bool(matched)

    def _record_too_long(self, scope: Scope, error: BodyTooLong) -> None:
        self._counters.too_long += 1
        self._report(scope, error.status_code, error.detail)

    async def _refuse(self, scope: Scope, send: Send, status: int, line: str, header: tuple[bytes, bytes]) -> None:
        self._report(scope, status, line)
        body = json.dumps(error_form(scope["path"], status, line, code=_CODES.get(status))).encode()
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length, header]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _report(self, scope: Scope, status: int, line: str) -> None:
        client = scope["client"] or ("unknown",)
        self._refusals.report(str(status), f"request of {client[0]} refused: {line}")


class WithCertificate:
    """The application on a connection whose client presented a certificate: adds the names in it to the scope
    (`CERTIFICATE`)."""

    def __init__(self, application: Any, names: frozenset[str]) -> None:
        self._application: ASGIApp = application
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application({**scope, CERTIFICATE: self._names}, receive, send)


class WithoutChunks:
    """The application for an HTTP/1.0 request, whose client does not know chunks: an answer of unknown length ends when its
    connection does."""

    def __init__(self, application: Any, cycle: RequestResponseCycle) -> None:
        self._application: ASGIApp = application
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, is_endless = self._cycle, False

        async def send_plain(message: Message) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = False if is_endless else None
            elif is_endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._application(scope, receive, send_plain)


class ProbesOnly:
    """The application on a connection that is reserved for probes; it serves one request."""

    def __init__(self, application: Any) -> None:
        self._application: ASGIApp = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES:
            await self._application(scope, receive, send_last)
            return
        body = json.dumps(error_form(scope["path"], 503, TOO_MANY)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        start = {"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"1")]}
        await send_last(start)
        await send_last({"type": "http.response.body", "body": body})
