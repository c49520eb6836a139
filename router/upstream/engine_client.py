"""The HTTP client for every call to an engine: clients' requests, and our own for tokens, models and health.

It is aiohttp (extra `router`) with three changes: it connects only to addresses that the policy allows, it waits longer while
the router itself is busy, and it does not blame the engine if an idle connection turns out to be closed.
"""

import io
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace
from yarl import URL

from kvatlas.addresses import parse_ip
from kvatlas.errors import KvatlasError
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.patience import wait_patiently

CONNECT_S = 2.0
KEEP_S = 4.0
"""Time that an idle connection is kept: uvicorn, which most engines use, closes it after 5 s."""
RESOLVED_S = 2
"""Time that a name's addresses are cached."""
MAX_HEAD_BYTES = 1 << 16
"""The longest line of an answer's head, which has at most MAX_HEADERS lines."""
MAX_HEADERS = 256
STATUSES = range(200, 600)
"""Valid statuses of an answer to a request without an upgrade (RFC 9110, 15)."""
WHOLE_BODY_BYTES = 1 << 20
"""A longer body is sent in pieces."""

_FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

RawHeaders = Sequence[tuple[bytes, bytes]]


class EngineAway(KvatlasError):
    """The engine did not answer, or not completely."""


class EngineUnreachable(EngineAway):
    """The engine did not answer, or disappeared before its first byte. `connected`: it accepted the connection."""

    def __init__(self, line: str, *, connected: bool) -> None:
        super().__init__(line)
        self.connected = connected


class EngineLost(EngineAway):
    """The engine disappeared mid-answer."""


class IncomingAnswer:
    """An answer whose head has arrived."""

    __slots__ = ("_content", "_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: RawHeaders = response.raw_headers
        self._response = response
        self._content = response.content

    def header(self, name: str) -> str:
        """The header's value; empty if absent."""
        return self._response.headers.get(name, "")

    async def read(self) -> bytes:
        """The part of the body that arrived since the last call: at least a byte, or empty at its end. Raises EngineLost."""
        try:
            return await self._content.readany()
        except _FAILURES as error:
            raise EngineLost(f"the engine went away in mid-answer: {_describe(error)}") from error

    async def read_all(self) -> bytes:
        """The rest of the body. Raises EngineLost."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the answer, and its connection unless the body was read to its end."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's whole answer to one of our own calls."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)


class EngineClient:
    """Connections to engines, unlimited in number and kept open for a while. Ignores proxies and passwords of the environment,
    since engines are near. `timeout_s`: time without a byte after which an engine counts as gone."""

    def __init__(self, addresses: AddressPolicy, timeout_s: float, connect_s: float = CONNECT_S) -> None:
        self._addresses = addresses
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)
        self._connect_s = min(connect_s, timeout_s)
        self._kept: aiohttp.ClientSession
        self._single: aiohttp.ClientSession
        """For a request's second try: always opens a new connection."""

    async def __aenter__(self) -> "EngineClient":
        tls = self._addresses.access.tls_context()
        self._kept = self._open(_Connector(self._addresses, self._connect_s, ssl=tls, keepalive_timeout=KEEP_S))
        self._single = self._open(_Connector(self._addresses, self._connect_s, ssl=tls, force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kept.close()
        await self._single.close()

    async def send(self, method: str, url: str, headers: RawHeaders = (), body: bytes = b"") -> IncomingAnswer:
        """Send a request and return its answer once the head arrived; the caller closes it. `url`: percent-encoded. Raises
        EngineUnreachable."""
        try:
            response = await self._request(method, URL(url, encoded=True), headers, body)
        except _FAILURES as error:
            connected = not isinstance(error, _NOT_CONNECTED)
            raise EngineUnreachable(f"{_origin(url)}: {_describe(error)}", connected=connected) from error
        if response.status not in STATUSES:
            response.close()
            raise EngineUnreachable(f"{_origin(url)}: no HTTP answer: status {response.status}", connected=True)
        return IncomingAnswer(response)

    async def call(
        self, method: str, url: str, value: object = None, *, more_headers: Mapping[str, str] = MappingProxyType({})
    ) -> Reply:
        """Make one of our own calls; `value` is sent as JSON. Raises EngineAway."""
        headers = [(b"accept", b"application/json")]
        headers += [(name.encode("latin-1"), more.encode("latin-1")) for name, more in more_headers.items()]
        body = b""
        if value is not None:
            headers.append((b"content-type", b"application/json"))
            body = json.dumps(value).encode()
        if key := self._addresses.own_key(_origin(url)):
            headers.append((b"authorization", f"Bearer {key}".encode()))
        async with self.answering(method, url, headers, body) as answer:
            return Reply(answer.status, await answer.read_all())

    @asynccontextmanager
    async def answering(
        self, method: str, url: str, headers: RawHeaders = (), body: bytes = b""
    ) -> AsyncIterator[IncomingAnswer]:
        """`send`, closed at the end of the block."""
        answer = await self.send(method, url, headers, body)
        try:
            yield answer
        finally:
            answer.close()

    async def _request(self, method: str, url: URL, headers: RawHeaders, body: bytes) -> aiohttp.ClientResponse:
        given = [(name.decode("latin-1").lower(), _text(value)) for name, value in headers]
        _is_new.set(False)
        try:
            return await self._kept.request(method, url, headers=given, data=_payload(body), allow_redirects=False)
        except _ConnectionLost as error:
            if _is_new.get() or error.has_begun:
                raise
        # an idle connection may close while a request is on its way (RFC 9112, 9.3.1): the engine has not begun it
        return await self._single.request(method, url, headers=given, data=_payload(body), allow_redirects=False)

    def _open(self, connector: "_Connector") -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEADERS,
            middlewares=(_try_once,),
        )


_is_new: ContextVar[bool] = ContextVar("_is_new", default=False)
"""True if this task's last request opened a new connection."""


class _ConnectionLost(aiohttp.ClientError):
    """The connection broke. `has_begun`: part of the answer's head had arrived."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_describe(error))
        self.has_begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


async def _try_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Hide lost connections from aiohttp, which otherwise retries some methods itself, on any connection."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as error:
        raise _ConnectionLost(error) from error


class _NoConnection(aiohttp.ClientConnectionError):
    """No connection was made."""


_NOT_CONNECTED = (_NoConnection, aiohttp.ClientConnectorError, aiohttp.NonHttpUrlClientError, ValueError)


class _Connector(aiohttp.TCPConnector):
    """Connects to allowed addresses only, within `connect_s`."""

    def __init__(self, addresses: AddressPolicy, connect_s: float, **options: Any) -> None:
        super().__init__(limit=0, ttl_dns_cache=RESOLVED_S, resolver=_Resolver(addresses), **options)
        self._addresses = addresses
        self._connect_s = connect_s

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's interface
    ) -> ResponseHandler:
        host, port = req.url.host or "", req.url.port or 0
        ip = parse_ip(host)
        if ip is not None and not self._addresses.allows(host, port, ip):
            raise _NoConnection(_not_allowed(host, port))
        try:
            connection = await wait_patiently(super()._create_connection(req, traces, timeout), self._connect_s)
        except TimeoutError as error:
            raise _NoConnection(f"no connection within {self._connect_s:g} s") from error
        _is_new.set(True)
        return connection


class _Resolver(AbstractResolver):
    """Resolves a name to its allowed addresses. The addresses are checked, not the name: DNS may change at any time."""

    def __init__(self, addresses: AddressPolicy) -> None:
        self._addresses = addresses
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [one for one in found if (ip := parse_ip(one["host"])) and self._addresses.allows(host, port, ip)]
        if found and not allowed:
            raise OSError(None, _not_allowed(host, port))
        return allowed

    async def close(self) -> None:
        await self._inner.close()


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    return io.BytesIO(body) if len(body) > WHOLE_BODY_BYTES else body or None


def _text(value: bytes) -> str:
    """A header's text. aiohttp sends headers as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _origin(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _not_allowed(host: str, port: int) -> str:
    return f"{host}:{port} is not an allowed engine address (--engine-addresses)"


def _describe(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {getattr(error.certificate_error, 'verify_message', error)} (--engine-ca-file)"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, aiohttp.ClientResponseError):
        return f"no HTTP answer: {' '.join(error.message.split())}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)  # names have negative numbers
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
