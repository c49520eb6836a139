"""The HTTP client for every call to an engine: clients' requests, and our own for tokens, models and health.

It connects only to addresses that the policy allows, waits longer while the router itself is busy, and does not blame the
engine if an idle connection turns out to be closed. With a library, most of the CPU time of a small request would go to
the library (docs/performance.md). So this file and `engine_connection.py` contain only what HTTP/1.1 requires.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from kvatlas.addresses import Ip, check_origin, host_and_port, parse_ip
from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError
from kvatlas.runtime.json_text import decode, encode
from kvatlas_router.upstream.dns_cache import NameLookups
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_connection import EngineConnection, RawHeaders, describe
from kvatlas_router.upstream.peer_timeouts import wait_patiently
from router_client.learning.loop_lateness import LoopLateness

CONNECT_S = 2.0
KEEP_S = 4.0
"""How long an idle connection is kept: uvicorn, which most engines use, closes it after 5 s."""
MOST_IDLE = 512
"""Maximum number of idle connections that are kept to one engine."""
MOST_WHOLE_BYTES = 256 << 20
"""Size of the longest answer that is kept whole, as JSON and errors are. 2,048 embeddings of 4,096 numbers are 170
MB."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "TRACE")
"""Methods whose requests have no body unless one is given; all others announce the body's length, even if it is 0."""


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

    __slots__ = ("_connection", "_release", "headers", "status")

    def __init__(self, connection: EngineConnection, release: "partial[None]") -> None:
        """`release`: called to return the connection."""
        self.status = connection.status
        self.headers: RawHeaders = connection.headers
        self._connection = connection
        self._release: partial[None] | None = release

    @property
    def may_be_cut(self) -> bool:
        """True if the answer's end can't be distinguished from a lost connection, because its head gives no length."""
        return self._connection.until_closed

    async def read(self) -> bytes:
        """The part of the body that has arrived since the last call: at least one byte, or empty at the body's end. Raises
        EngineLost."""
        part = await self._connection.read()
        if not part and self._connection.failure:
            raise EngineLost(f"the engine went away mid-answer: {self._connection.failure}")
        return part

    async def read_all(self, seen: Callable[[bytes], object] = len) -> bytes:
        """The rest of the body; `seen` is called with each part as it arrives. Raises EngineLost, also if there are
        more than MOST_WHOLE_BYTES."""
        parts, left = [], MOST_WHOLE_BYTES
        while part := await self.read():
            left -= len(part)
            if left < 0:
                raise EngineLost(f"the engine's answer is longer than {MOST_WHOLE_BYTES} bytes")
            seen(part)
            parts.append(part)
            if self._connection.is_read:
                break
        return b"".join(parts)

    def close(self) -> None:
        """Close the answer, and its connection unless the answer has arrived completely. Calling this twice is
        harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's whole answer to one of our own calls."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Decode the body as JSON. Raises ValueError."""
        return decode(self.body)


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """The origin of an engine's URL; there is one object for each. `name`: host and port as written in the URL. `ip`: its
    address, if it has no host name."""

    host: str
    port: int
    tls: bool
    name: bytes
    ip: Ip | None


class EngineClient:
    """Connections to engines, unlimited in number and kept open for a while. Ignores proxies and passwords set in the
    environment, since engines are nearby. `timeout_s`: an engine that sends nothing for this long counts as gone. `lateness`:
    that of the event loop, once the client has been entered."""

    def __init__(self, addresses: AddressPolicy, timeout_s: float, connect_s: float = CONNECT_S) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._connect_s = min(connect_s, timeout_s)
        self._idle: dict[_Origin, list[EngineConnection]] = {}
        self._open: set[EngineConnection] = set()
        self._names = NameLookups()
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "EngineClient":
        self._tls = self._addresses.access.tls_context()
        self._loop = asyncio.get_running_loop()
        self.lateness = LoopLateness.of_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        self._names.close()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # gives the connections a chance to notice that they are closed

    async def send(self, method: str, url: str, headers: RawHeaders = (), body: bytes = b"") -> IncomingAnswer:
        """Send a request and return its answer once its head has arrived; the caller closes the answer. `url`:
        percent-encoded. Raises EngineUnreachable."""
        base, target = _split(url)
        try:
            origin = _parse_origin(base)
            head = _request_head(method, target, origin.name, headers, len(body))
        except ValueError as error:
            raise EngineUnreachable(f"{base}: {error}", connected=False) from error
        without_body = method == "HEAD"
        connection = self._take_idle(origin)
        if connection is not None:
            await self._ask(connection, head, body, without_body=without_body)
            if connection.is_stale:
                # it may have closed while the request was on its way (RFC 9112, 9.3.1): the engine has hardly begun to
                # process it
                connection = None
        if connection is None:
            try:
                connection = await self._connect(origin)
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                raise EngineUnreachable(f"{base}: {describe(error)}", connected=False) from error
            await self._ask(connection, head, body, without_body=without_body)
        if not connection.has_head:
            raise EngineUnreachable(f"{base}: {connection.failure}", connected=True)
        return IncomingAnswer(connection, partial(self._release, origin, connection))

    async def call(
        self, method: str, url: str, value: object = None, *, more_headers: Mapping[str, str] = MappingProxyType({})
    ) -> Reply:
        """Make one of our own calls; `value` is sent as JSON. Raises EngineAway."""
        headers = [(b"accept", b"application/json")]
        headers += [(name.encode("latin-1"), more.encode("latin-1")) for name, more in more_headers.items()]
        body = b""
        if value is not None:
            headers.append((b"content-type", b"application/json"))
            body = encode(value)
        if key := self._addresses.own_key(_split(url)[0]):
            headers.append((b"authorization", f"Bearer {key}".encode()))
        answer = await self.send(method, url, headers, body)
        try:
            return Reply(answer.status, await answer.read_all())
        finally:
            answer.close()

    @asynccontextmanager
    async def answering(
        self, method: str, url: str, headers: RawHeaders = (), body: bytes = b""
    ) -> AsyncIterator[IncomingAnswer]:
        """Like `send`, but the answer is closed at the end of the block."""
        answer = await self.send(method, url, headers, body)
        try:
            yield answer
        finally:
            answer.close()

    # ------------------------------------------------------------ connections

    async def _ask(self, connection: EngineConnection, head: bytes, body: bytes, *, without_body: bool) -> None:
        try:
            connection.send(head, body, without_body=without_body)
            await connection.wait_for_head()
        except BaseException:
            connection.abort()
            raise

    def _take_idle(self, origin: _Origin) -> EngineConnection | None:
        idle, oldest = self._idle.get(origin), self._loop.time() - KEEP_S
        while idle:
            connection = idle.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _release(self, origin: _Origin, connection: EngineConnection) -> None:
        if not connection.can_be_kept() or len(self._idle.get(origin, ())) >= MOST_IDLE:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_S, self._close_old)

    def _close_old(self) -> None:
        """Close the connections that have been idle for too long."""
        oldest = self._loop.time() - KEEP_S
        for idle in self._idle.values():
            for connection in idle:
                if connection.closed or connection.idle_since <= oldest:
                    connection.abort()
        self._idle = {
            origin: left
            for origin, idle in self._idle.items()
            if (left := [connection for connection in idle if not connection.closed])
        }
        self._sweep = self._loop.call_later(KEEP_S, self._close_old) if self._idle else None

    async def _connect(self, origin: _Origin) -> EngineConnection:
        """Raises OSError and ValueError."""
        try:
            return await wait_patiently(self._connect_to_any(origin), self._connect_s, EngineConnection.abort)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {self._connect_s:g} s") from error

    async def _connect_to_any(self, origin: _Origin) -> EngineConnection:
        """Connect to the first of the origin's addresses that accepts the connection. Each address except the last gets its
        share of the time."""
        addresses = await self._allowed_addresses(origin)
        for number, address in enumerate(addresses, 1):
            share_s = None if number == len(addresses) else self._connect_s / len(addresses)
            try:
                async with asyncio.timeout(share_s):
                    _, connection = await self._loop.create_connection(
                        partial(EngineConnection, self._open, self._loop, self._timeout_s),
                        address,
                        origin.port,
                        ssl=self._tls if origin.tls else None,
                        server_hostname=origin.host.rstrip(".") if origin.tls else None,  # certificates name no root
                    )
                if not connection.closed:
                    self._open.add(connection)
                return connection
            except OSError:
                if number == len(addresses):
                    raise
        raise OSError(None, "its name has no address")

    async def _allowed_addresses(self, origin: _Origin) -> list[str]:
        """The allowed addresses of the origin. The addresses are checked, not the name, since DNS may change at any
        time."""
        host, port = origin.host, origin.port
        found = [host] if origin.ip is not None else await self._names.addresses(host)
        allowed = [one for one in found if (ip := parse_ip(one)) and self._addresses.allows(host, port, ip)]
        if found and not allowed:
            raise OSError(None, f"{host}:{port} is not an allowed engine address (--engine-addresses)")
        return allowed


def _split(url: str) -> tuple[str, str]:
    """Split a URL into its origin and the target there."""
    at = url.find("/", url.find("://") + 3)
    return (url, "/") if at < 0 else (url[:at], url[at:])


@lru_cache(maxsize=16_384)
def _parse_origin(base: str) -> _Origin:
    """Raises InvalidValue, which is a ValueError."""
    checked = check_origin(base)
    host, port = host_and_port(checked)
    scheme, _, name = checked.partition("://")
    encoded = name.encode() if name.isascii() else b":".join(part.encode("idna") for part in name.split(":"))
    return _Origin(host, port, scheme == "https", encoded, parse_ip(host))


def _request_head(method: str, target: str, name: bytes, headers: RawHeaders, length: int) -> bytes:
    """The head of a request. Raises ValueError for anything that can't be sent as a single request."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target.encode("latin-1")), b"host: " + name]
    lines += [b"%b: %b" % pair for pair in headers]
    if length or method not in _WITHOUT_BODY:
        lines.append(b"content-length: %d" % length)
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head or " " in target:
        raise ValueError("control characters in the request's head")
    return head + b"\r\n\r\n"
