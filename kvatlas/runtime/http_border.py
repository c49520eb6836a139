"""What an HTTP server refuses before an application sees it.

That is: a request with both Content-Length and Transfer-Encoding (two readers of it may disagree where it ends), a body that is
too long, headers that don't come in time, too many connections and, if the server has tokens, requests without one of them
(probes excepted).
"""

import asyncio
import hmac
import json
from dataclasses import dataclass
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvatlas.runtime.http_access import HttpAccess
from kvatlas.runtime.rate_limited_log import RateLimitedLog

PROBES = frozenset({"/health", "/healthz", "/ready", "/readyz"})
"""Answered without a token: what asks is the machine's own, and learns one bit."""

_CODES = {401: "invalid_api_key"}
"""As OpenAI's API names them."""
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"


@dataclass(slots=True)
class HttpCounters:
    """Refusals: `framing` (both lengths), `too_long` (the body), `too_late` (the headers), `too_many` (connections), `denied`
    (no valid token)."""

    framing: int = 0
    too_long: int = 0
    too_late: int = 0
    too_many: int = 0
    denied: int = 0


class BodyTooLong(HTTPException):
    """Raised by an application's `receive`; Starlette answers 413."""

    def __init__(self, length: str, limit: int) -> None:
        super().__init__(413, f"the body has {length} bytes; expected at most {limit}")


class HttpBorder:
    """An ASGI application in front of another one: lets through what may pass."""

    def __init__(
        self, application: ASGIApp, access: HttpAccess, counters: HttpCounters, refusals: RateLimitedLog
    ) -> None:
        self._application = application
        self._access = access
        self._counters = counters
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        length = headers.get(b"content-length")
        if length is not None and b"transfer-encoding" in headers:
            self._counters.framing += 1
            line = "Content-Length and Transfer-Encoding are both given; expected one of them"
            await self._refuse(scope, send, 400, line, (b"connection", b"close"))
        elif not self._is_allowed(scope, headers.get(b"authorization", b"")):
            self._counters.denied += 1
            line = "no valid token; expected `Authorization: Bearer TOKEN`"
            await self._refuse(scope, send, 401, line, (b"www-authenticate", b"Bearer"))
        else:
            await self._application(scope, self._bounded(scope, int(length or 0), receive), send)

    def _is_allowed(self, scope: Scope, authorization: bytes) -> bool:
        """Browsers send no token with OPTIONS."""
        if not self._access.tokens or scope["path"] in PROBES or scope["method"] == "OPTIONS":
            return True
        scheme, _, token = authorization.partition(b" ")
        # all of them, each in constant time: how long it takes says nothing of a token
        matches = [hmac.compare_digest(token.strip(), one) for one in self._access.tokens]
        return scheme.lower() == b"bearer" and any(matches)

    def _bounded(self, scope: Scope, announced: int, receive: Receive) -> Receive:
        """`receive`, which raises BodyTooLong."""
        limit, received = self._access.body_bytes, 0

        async def bounded() -> Message:
            nonlocal received
            if announced <= limit:
                message = await receive()
                received += len(message.get("body", b""))
                if received <= limit:
                    return message
            self._counters.too_long += 1
            error = BodyTooLong(str(announced) if announced else f"more than {limit}", limit)
            self._report(scope, error.status_code, error.detail)
            raise error

        return bounded

    async def _refuse(self, scope: Scope, send: Send, status: int, line: str, header: tuple[bytes, bytes]) -> None:
        self._report(scope, status, line)
        error = {"message": line, "type": "invalid_request_error", "param": None, "code": _CODES.get(status)}
        body = json.dumps({"error": error}).encode()
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length, header]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _report(self, scope: Scope, status: int, line: str) -> None:
        client = scope["client"] or ("unknown",)
        self._refusals.report(str(status), f"request of {client[0]} refused: {line}")


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for headers, and for the rest of a body that was answered already; and at most so many
    connections."""

    def __init__(
        self, *args: Any, access: HttpAccess, counters: HttpCounters, refusals: RateLimitedLog, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._access = access
        self._counters = counters
        self._refusals = refusals
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._access.connections:
            self._counters.too_many += 1
            line = f"connection refused: {self._access.connections} are open, the most that --http-connections allows"
            self._refusals.report("connections", line)
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def _set_deadline(self) -> None:
        """If the client is to send something. An idle connection between two requests is uvicorn's (`KEEP_ALIVE_S`)."""
        reading_headers = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        discarding = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (reading_headers or discarding):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._access.header_s, self._end_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late(self) -> None:
        self._counters.too_late += 1
        client = self.client or ("unknown",)
        self._refusals.report(
            "late", f"connection of {client[0]} closed: no whole request within {self._access.header_s:g} s"
        )
        self.transport.close()
