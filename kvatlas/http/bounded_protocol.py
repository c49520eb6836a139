"""HTTP/1.1 connections that are limited in number, with deadlines for the client's data.

A refusal is an answer in JSON. Its connection stays open until the client has had time to read it, because data that arrives on
a closed socket would reset the connection and discard the answer.

The requests on a connection are read one after another. Data that follows a request waits until that request has been answered,
so an error in it affects no other request.
"""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from httptools import HttpParserCallbackError, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvatlas.http.access import MOST_HEADER_BYTES, HttpAccess
from kvatlas.http.answer_transport import AnswerTransport
from kvatlas.http.chunked_body import ChunkedBody
from kvatlas.http.connection_shares import Closable, ConnectionShares, Place
from kvatlas.http.counters import HttpCounters
from kvatlas.http.departure import Departure
from kvatlas.http.error_form import error_form
from kvatlas.http.guard import ON_LEAVE, TOO_MANY, ProbesOnly, WithCertificate, WithoutChunks
from kvatlas.runtime.rate_limited_log import RateLimitedLog

BODY_GRACE_S = 10.0
LEAST_BYTES_PER_S = 2_048
"""Minimum rate at which a body must arrive after the grace period."""
STOP_S = 5.0
"""How long an unfinished body may take when the server stops."""
PROBE_S = 2.0
"""How long a connection reserved for probes may take to send its headers."""
LINGER_S = 2.0
"""How long a refused client has to read the reason."""

_errors = logging.getLogger("uvicorn.error.requests")
_errors.setLevel(logging.ERROR)  # its warnings (one per request) are replaced by rate-limited reports
_LINE_END = re.compile(rb"\r?\n")
_LINE_ENDS = re.compile(rb"[\r\n]+")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `shares`: the connections of its server. `arriving`: what held this connection's place during the TLS
    handshake."""

    def __init__(
        self,
        *args: Any,
        access: HttpAccess,
        shares: ConnectionShares[Closable],
        counters: HttpCounters,
        refusals: RateLimitedLog,
        arriving: Closable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _errors
        self._access = access
        self._shares = shares
        self._arriving = arriving
        self._counters = counters
        self._refusals = refusals
        self._header_s = access.header_s
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_answer: asyncio.TimerHandle | None = None
        """Ends the connection if the client does not read its answer."""
        self._body_since: float | None = None
        self._body_bytes = 0
        self._body_left = 0
        """Bytes of a body of known length that have not arrived yet."""
        self._chunks: ChunkedBody | None = None
        """A body that comes in chunks, until its last chunk begins."""
        self._unread = bytearray()
        """Data that has not been parsed yet."""
        self._hidden_framing = b""
        """The header that gives the length of a body which the parser does not expect."""
        self._head_parser = self.parser
        self._stops_at: float | None = None
        self._has_place = True
        self._refused = False
        self.url = b""
        self._departure = Departure()
        self._in_head = True
        """No request has begun, or its headers are not complete."""
        self._has_begun = False
        self._body_parts: list[bytes] = []
        self._bare_bytes = 0
        """Bytes of headers, trailers and chunk extensions since the last complete headers or part of a body."""

    # ------------------------------------------------------------ events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (
            names := _certificate_names(transport.get_extra_info("peercert"))
        ) and self._access.client_ca_file is not None:
            self.app = WithCertificate(self.app, names)
        if self._arriving is not None:
            self._shares.close(self._arriving)
        place = self._shares.open(self, self.client[0] if self.client else None)
        if place is not Place.FULL:
            self._counters.too_many += 1
            self._refusals.report("connections", self._shares.describe_refusal(self._who))
        if place is Place.DROPPED:
            self._refused = True
            transport.abort()
            return
        if place is Place.NONE:
            self._has_place = False
            self._deadline = self.loop.call_later(LINGER_S, transport.abort)
            return
        if place is Place.PROBES:
            self._header_s = min(PROBE_S, self._header_s)
            self.app = ProbesOnly(self.app)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._has_place:
            self.url = _target_in(data)
            self._refuse(503, TOO_MANY)
            return
        self._unread += data
        self._read()
        self._note_use()
        if len(self._unread) > MOST_HEADER_BYTES:
            self.flow.pause_reading()
        self._set_deadline()

    def _read(self) -> None:
        """Parse data up to the end of the request that is currently being read."""
        start = 0
        while start < len(self._unread) and not (self._is_busy or self._refused or self.transport.is_closing()):
            end = self._piece_end(start)
            self._body_bytes += end - start
            self._bare_bytes += end - start
            super().data_received(self._unread[start:end])  # type: ignore[arg-type]
            self._take_body()
            if self._bare_bytes > MOST_HEADER_BYTES and not self._refused:
                self._counters.headers += 1
                self._refuse(431, f"the headers are longer than {MOST_HEADER_BYTES} bytes, which is the limit")
            start = end
        del self._unread[:start]

    @property
    def _is_busy(self) -> bool:
        """True if a request has been read completely but not answered yet."""
        return self._in_head and self.cycle is not None and not self.cycle.response_complete

    def _piece_end(self, start: int) -> int:
        """The end of the next piece of unread data for the parser. A piece ends no later than a request does: at the end of its
        body, or of an empty line, which may have begun in earlier data. The parser is called once per piece, so nothing that a
        client can send is cut into many small pieces."""
        if self._body_left:
            return min(start + self._body_left, len(self._unread))
        if self._chunks is not None:
            trailers = self._chunks.find_trailers(self._unread, start)
            if trailers is None:
                return len(self._unread)
            self._chunks = None
            if self._unread.startswith(b"\r\n", trailers):
                return trailers + 2
            start = trailers
        elif rest := (_LINE_END if self._has_begun else _LINE_ENDS).match(self._unread, start):
            return rest.end()
        empty = self._unread.find(b"\r\n\r\n", start)
        return len(self._unread) if empty < 0 else empty + 4

    # ------------------------------------------------------------ events of the parser

    def on_message_begin(self) -> None:
        if self._is_busy:
            raise ValueError("it begins within another request")
        self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if (version := self.parser.get_http_version()) not in ("1.0", "1.1"):
            raise ValueError(f"its version is {version}")
        framing = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        codings = [value.lower() for name, value in framing if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise ValueError(f"its Transfer-Encoding is {b', '.join(codings).decode('latin-1')}; expected chunked")
        self._in_head, self._bare_bytes = False, 0
        self.url = _origin_form(self.url)
        super().on_headers_complete()
        if self.parser.get_method() == b"CONNECT":  # the data that follows is not HTTP
            self.cycle.keep_alive = False
            return
        self._chunks = ChunkedBody() if codings else None
        self._body_left = 0 if codings else sum(int(value) for _, value in framing)
        if self.parser.should_upgrade() and (codings or self._body_left):
            self._hidden_framing = b"%b: %b" % framing[0]

    def on_body(self, body: bytes) -> None:
        self._body_parts.append(body)

    def _take_body(self) -> None:
        """Pass on, in one call, all parts of a body that the parser has found, because its chunks may be many and small."""
        if not self._body_parts or self._refused:
            return
        body = b"".join(self._body_parts)
        self._body_parts.clear()
        self._bare_bytes = 0
        if self._body_left:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._take_body()
        if self._hidden_framing:
            return
        super().on_message_complete()
        self.flow.resume_reading()  # a long body paused reading; a disconnect is only noticed while reading
        self._in_head, self._has_begun, self.url = True, False, b""
        self.cycle.more_body = False  # even if the request was answered before the body ended
        if self.cycle.response_complete and not self.transport.is_closing():  # only now is the connection idle
            after_s, close = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(after_s, close)
        self.parser = self._head_parser

    def _unsupported_upgrade_warning(self) -> None:
        """Continue after the headers of a request that asks for a different protocol. `HttpBorder` refuses WebSockets, and any
        other upgrade may be ignored (RFC 9110, 7.8). The parser takes the request's body for data of that protocol, so a
        different parser reads it."""
        if self._hidden_framing:
            head, self._hidden_framing = b"POST / HTTP/1.1\r\n%b\r\n\r\n" % self._hidden_framing, b""
            events = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
            self.parser = HttpRequestParser(events)
            self.parser.feed_data(head)

    # ------------------------------------------------------------ answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = AnswerTransport(self.transport, self.loop)  # type: ignore[assignment]
        self._departure = cycle.scope[ON_LEAVE] = Departure()  # type: ignore[literal-required]
        if cycle.scope["http_version"] == "1.0":
            app = WithoutChunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._departure.forget()
        super().on_response_complete()
        self._read()
        self._note_use()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        del self._head_parser  # it refers to this object
        self._shares.close(self)
        self._cancel_deadline()
        self._stop_unread()
        self._departure.report()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def shutdown(self) -> None:
        """Stop the server without waiting for an unfinished body."""
        self._stops_at = self.loop.time() + STOP_S
        super().shutdown()
        self._cancel_deadline()
        self._set_deadline()

    def _note_use(self) -> None:
        if self._in_head and self.timeout_keep_alive_task is not None:
            self._shares.rest(self)
        else:
            self._shares.wake(self)

    def close_idle(self) -> None:
        self.timeout_keep_alive_handler()

    # ------------------------------------------------------------ deadlines

    def _set_deadline(self) -> None:
        """Set a deadline if it is the client's turn to send something. Connections that are idle between two requests are left
        to uvicorn (`HttpAccess.idle_s`)."""
        if self._refused:
            return
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        reads_body = not answered and cycle.more_body and not cycle.response_started
        if reads_body != (self._body_since is not None):
            self._cancel_deadline()
            self._body_since, self._body_bytes = (self.loop.time() if reads_body else None), 0
        reads_headers = answered and self._in_head and self.timeout_keep_alive_task is None
        discards = answered and not self._in_head
        if not (reads_headers or reads_body or discards):
            self._cancel_deadline()
        elif self._deadline is None:
            after_s = self._body_left_s() if reads_body else self._header_s
            self._deadline = self.loop.call_later(after_s, self._end_body if reads_body else self._end_late)

    def _body_left_s(self) -> float:
        """How many seconds are left until the body is late."""
        assert self._body_since is not None
        allowed_s = min(self._access.body_s, BODY_GRACE_S + self._body_bytes / LEAST_BYTES_PER_S)
        due = self._body_since + allowed_s
        return (due if self._stops_at is None else min(due, self._stops_at)) - self.loop.time()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_body(self) -> None:
        self._deadline = None
        if self._body_since is None or self._body_left_s() > 0:  # more of it arrived in the meantime
            self._set_deadline()
        elif self._stops_at is not None and self.loop.time() >= self._stops_at:
            self._refuse(503, "the server is stopping, and the body is not complete; send the request again")
        else:
            self._counters.slow += 1
            rate = f"at {LEAST_BYTES_PER_S} bytes per second or more after {BODY_GRACE_S:g} s"
            self._refuse(408, f"the body is not complete; it must arrive within {self._access.body_s:g} s, and {rate}")

    def _stop_unread(self) -> None:
        if self._unread_answer is not None:
            self._unread_answer.cancel()
            self._unread_answer = None

    def _await_reading(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        self._unread_answer = self.loop.call_later(self._access.unread_s, self._end_unread, unread_bytes)

    def _end_unread(self, unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unread_bytes:
            self._await_reading()
            return
        self._counters.unread += 1
        line = f"connection of {self._who} closed: it read nothing of an answer for {self._access.unread_s:g} s"
        self._refusals.report("unread", line)
        self.transport.abort()

    def _end_late(self) -> None:
        self._counters.too_late += 1
        line = f"connection of {self._who} closed: no whole request within {self._header_s:g} s"
        self._refusals.report("late", line)
        self.transport.close()

    # ------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:
        """Called while a parser error is being handled. Two readers may disagree about where such a request ends."""
        self._counters.framing += 1
        error = sys.exception()
        cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
        line = f"this is not HTTP/1.1: {cause!s:.200}"
        if self.cycle is None and self._unread[:1] >= b"\x80":
            # a ZeroMQ socket would mistake an answer for messages of ZMTP 1.0
            self._report_refusal(400, line)
            self._refused = True
            self._cancel_deadline()
            self.transport.close()
            return
        self._refuse(400, line)

    @property
    def _who(self) -> str:
        return self.client[0] if self.client else "unknown"

    def _report_refusal(self, status: int, line: str) -> None:
        self._refusals.report(str(status), f"request of {self._who} refused: {line}")

    def _refuse(self, status: int, line: str) -> None:
        """Answer in place of the application, and give the client time to read the answer."""
        self._report_refusal(status, line)
        self._refused = True
        self._cancel_deadline()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._departure.report()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._answer(status, line)
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _answer(self, status: int, line: str) -> None:
        path = unquote(_origin_form(self.url).decode("latin-1"))
        body = json.dumps(error_form(path, status, line)).encode()
        headers = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        headers += [f"content-length: {len(body)}", "connection: close", *(["retry-after: 1"] if status == 503 else [])]
        self.transport.write("\r\n".join([*headers, "\r\n"]).encode() + body)


def _target_in(data: bytes) -> bytes:
    """The target of a request that has not been parsed; empty if it is incomplete."""
    words = data.split(b" ", 2)
    return words[1] if len(words) == 3 else b""


def _origin_form(target: bytes) -> bytes:
    """The path and query of a target such as http://host/path. Clients send such targets to proxies, and servers must accept
    them (RFC 9112, 3.2.2). Any other target without a leading slash becomes a path that no application serves."""
    if target.startswith(b"/"):
        return target
    scheme, _, rest = target.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        return b"/" + target
    authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    return path if path.startswith(b"/") else b"/" + path


def _certificate_names(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """The names in a verified certificate: its URIs and DNS names or, if it has neither, its common name (RFC 9525)."""
    if not certificate:
        return frozenset()
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("URI", "DNS")}
    if not names:
        names = {value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"}
    return frozenset(names)
