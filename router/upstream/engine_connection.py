"""One HTTP/1.1 connection to an engine, parsed by httptools: sends one request at a time, and holds its answer as it
arrives."""

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import cast

import httptools

MAX_BARE_BYTES = 1 << 18
"""Maximum number of bytes that an engine may send without any byte of a body: an answer's head, the interim answers before
it, and the trailers after it."""
MAX_HEADERS = 256
MOST_KEPT_BYTES = 1 << 18
"""Once the reader of an answer has left this much of it unread, no more is read from the network."""
WHOLE_BYTES = 1 << 16
"""A longer body is not copied to be sent together with its head."""
STALE_S = 0.25
"""A connection that was idle may be closing while a request is sent. If that is noticed later than this, the engine may
already have begun to process the request."""
LAST_LOOK_S = 0.05
"""A busy router may check late. So after its time limit, an engine gets this much longer, while everything that has arrived is
read."""

_INTERIM, _SWITCHING, _LEAST, _END = 100, 101, 200, 600
"""Statuses (RFC 9110, 15): interim answers, an upgrade, and the range of final answers."""

RawHeaders = Sequence[tuple[bytes, bytes]]


class EngineConnection(asyncio.Protocol):
    """`status` and `headers`: those of the answer, once `has_head`. `done`: the whole answer has arrived. `failure`: why the
    rest of it won't arrive. `is_stale`: the engine closed the connection within STALE_S of the request, without sending a byte
    of an answer. `until_closed`: the answer ends only with the connection. `closed`: the connection can't be used any more.
    `idle_since`: used by the connection's owner."""

    __slots__ = (
        "_bare_bytes",
        "_has_end",
        "_heard_at",
        "_interim",
        "_is_silent",
        "_keep",
        "_kept_bytes",
        "_last_look",
        "_loop",
        "_open",
        "_parser",
        "_parts",
        "_paused",
        "_reader",
        "_timeout_s",
        "_timer",
        "_transport",
        "_without_body",
        "closed",
        "done",
        "failure",
        "has_head",
        "headers",
        "idle_since",
        "is_stale",
        "status",
        "until_closed",
    )

    _transport: asyncio.Transport

    def __init__(self, connections: "set[EngineConnection]", loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """`connections`: the set from which the connection removes itself when it closes. `timeout_s`: how long an engine
        that has a request may be silent."""
        self._open = connections
        self.closed = False
        self.idle_since = 0.0
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._begin()
        self.done = True  # there is no request yet

    def _begin(self, *, without_body: bool = False) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = self.done = self._has_end = False
        self.is_stale = False
        self._is_silent = True
        self.failure = ""
        self._without_body = without_body
        self._interim = self.until_closed = self._keep = self._paused = self._last_look = False
        self._bare_bytes = self._kept_bytes = 0
        self._parts.clear()
        self._heard_at = self._loop.time()

    # ------------------------------------------------------------ use

    def send(self, head: bytes, body: bytes, *, without_body: bool) -> None:
        """Send a request. The answer to the last one must be `done`. `without_body`: the answer has no body, whatever its head
        says (HEAD)."""
        self._begin(without_body=without_body)
        if self.closed or self._transport.is_closing():
            self.is_stale = self.idle_since > 0
            self._fail("it closed the connection")
            return
        if len(body) < WHOLE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    async def wait_for_head(self) -> None:
        """Wait for the answer's head, or for a failure."""
        while not (self.has_head or self.failure):
            await self._wait()

    async def read(self) -> bytes:
        """The part of the body that arrived since the last call; empty at the end, or at a failure."""
        parts = self._parts
        while not parts:
            if self.done or self.failure:
                return b""
            await self._wait()
        part = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._kept_bytes = 0
        if self._paused:
            self._paused, self._heard_at = False, self._loop.time()
            self._transport.resume_reading()
        return part

    @property
    def is_read(self) -> bool:
        """True if the whole answer has arrived and was read."""
        return self.done and not self._parts

    def can_be_kept(self) -> bool:
        """True if another request may follow. None may follow an answer whose unread rest stopped the reading."""
        if self.closed or self._paused or not self.done:
            return False
        return self._keep and not self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection immediately."""
        if not self.closed:
            self.closed = True
            self._transport.abort()

    async def _wait(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, line: str) -> None:
        if not (self.done or self.failure):
            self.failure = line
        self.abort()
        self._wake()

    def _look(self) -> None:
        """Fail if the engine has been silent too long. Time during which nothing is expected from it does not count."""
        self._timer = None
        if self.closed or self.done:
            return
        now = self._loop.time()
        if self._reader is None:  # it is the client that is slow, not the engine
            self._heard_at = now
        left_s = self._heard_at + self._timeout_s - now
        if left_s <= 0 and self._last_look:
            self._fail(f"it was silent for {self._timeout_s:g} s")
            return
        self._last_look = left_s <= 0
        self._timer = self._loop.call_later(left_s if left_s > 0 else LAST_LOOK_S, self._look)

    # ------------------------------------------------------------ events of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.done:  # nothing was asked for, so this is not an answer to whatever is sent next
            self.abort()
            return
        self._is_silent = self._last_look = False
        self._heard_at = self._loop.time()
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(f"no HTTP answer: status {_SWITCHING}")
        except httptools.HttpParserError as error:
            self._fail(self.failure or f"no HTTP answer: {error}")
        if self._bare_bytes > MAX_BARE_BYTES and not self.done:
            self._fail(f"no HTTP answer: {MAX_BARE_BYTES} bytes without a body")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        by_engine, self.closed = not self.closed, True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._open.discard(self)
        if not by_engine:
            self._fail("the router closed the connection")
            return
        if exc is None and self.until_closed:
            self.done = True
        self.is_stale = self._is_silent and self._loop.time() - self._heard_at <= STALE_S
        self._fail("it closed the connection" if exc is None else describe(exc))

    # ------------------------------------------------------------ events of the parser

    def on_message_begin(self) -> None:
        if self.done:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:  # a trailer
            return
        value = value.rstrip(b" \t")
        self.headers.append((name, value))
        lower = name.lower()
        if lower == b"content-length" or (lower == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._has_end = True
        if len(self.headers) > MAX_HEADERS:
            self._fail(f"no HTTP answer: more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self.done or self.failure:
            return
        status = self._parser.get_status_code()
        self._interim = _INTERIM <= status < _LEAST and status != _SWITCHING
        if self._interim:
            self.headers, self._has_end = [], False
            return
        if not _LEAST <= status < _END:
            self._fail(f"no HTTP answer: status {status}")
            return
        self.status, self.has_head = status, True
        if self._without_body:
            self.done = True
        self.until_closed = not (self.done or self._has_end)

    def on_body(self, data: bytes) -> None:
        self._bare_bytes = 0
        if self.done:
            return
        self._parts.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > MOST_KEPT_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self.has_head and not self.done:
            self.done, self._keep = True, self._parser.should_keep_alive()


def describe(error: BaseException) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (--engine-ca-file)"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)  # names have negative numbers
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
