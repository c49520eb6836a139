"""One attempt on one engine: its answer from the first byte on, or the reason why there is none."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import field
from types import TracebackType
from typing import Self

from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode

from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError
from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import can_be_read, header_value, is_json
from kvatlas_router.progress.watched_attempt import WatchedAttempt
from kvatlas_router.upstream.engine_client import EngineClient, EngineLost, EngineUnreachable, IncomingAnswer
from kvatlas_router.upstream.engine_connection import RawHeaders
from router_client.learning.timings import AnswerClock


class EngineRefused(KvatlasError):
    """The engine refused the request; `answer` says why."""

    def __init__(self, line: str, answer: "WholeAnswer") -> None:
        super().__init__(line)
        self.answer = answer


class EngineStalled(EngineUnreachable):
    """The engine makes no progress, and the request was abandoned before its first byte."""

    def __init__(self, line: str) -> None:
        super().__init__(line, connected=True)


class EngineHangs(EngineLost):
    """The engine makes no progress mid-answer. Its answer may still come: see `StreamedAnswer`."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to an engine. `path`: the path as written by the client, percent-encoded."""

    method: str
    path: str
    query: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer. `clock`: the times at which it arrived. `span`: the span of its attempt."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    clock: AnswerClock = field(default_factory=AnswerClock, compare=False)
    span: Span = field(default=INVALID_SPAN, compare=False)


@dataclass(slots=True)
class StreamedAnswer:
    """An answer whose first bytes have arrived: an iterator over its body. It raises EngineLost, or EngineHangs if `watched`
    abandons it for now; after `watched.stay()`, reading can continue.

    `clock`: started with the request; the answer's reader counts its parts with it. `events`: the answer is an uncompressed
    stream of server-sent events. `span`: the span of its attempt."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: bytes
    rest: IncomingAnswer
    clock: AnswerClock
    watched: WatchedAttempt
    events: bool = True
    span: Span = INVALID_SPAN

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        chunk, self.first = self.first, b""
        if chunk:
            return chunk
        watched = self.watched
        watched.reading = True
        try:
            chunk = await self.rest.read()
        except asyncio.CancelledError as error:
            if not watched.took_cancellation():
                raise
            raise (EngineLost if watched.is_lost else EngineHangs)("the engine hangs mid-answer") from error
        finally:
            watched.reading = False
        if not chunk:
            raise StopAsyncIteration
        watched.progress(chunk)
        return chunk

    def leave(self) -> None:
        """Abandon this answer in favour of another engine's."""
        self.watched.move()
        self.rest.close()


Answer = WholeAnswer | StreamedAnswer

_OWN_PATH = re.compile(rb"/(?![/\\])[\x21-\x7e]*$")
_OF_BODY = {b"content-type", b"content-encoding", b"cache-control", b"x-accel-buffering"}


def error_refusal(url: str, error: EngineError, answer: Answer) -> EngineRefused:
    """The refusal for an error inside an answer with status 200. It gets the status that the error stands for."""
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _OF_BODY]
    whole = WholeAnswer(error.status, [*headers, (b"content-type", b"application/json")], error.body, answer.clock)
    return EngineRefused(f"{url} returned an error: {error.line}", whole)


class EngineAttempt:
    """`async with EngineAttempt(...) as answer`: one request to one engine. Leaving the block before the end of the answer
    closes the connection.

    The answer may have any status: a successful answer that is not JSON is yielded as soon as its first bytes arrive, any
    other when it is complete. Raises EngineUnreachable if the engine is down, or EngineStalled if `watched` abandons the
    request; for errors after the answer has begun, see `StreamedAnswer`.
    """

    __slots__ = ("_base_url", "_client", "_headers", "_incoming", "_request", "_span", "_watched")

    def __init__(
        self,
        client: EngineClient,
        watched: WatchedAttempt,
        base_url: str,
        request: EngineRequest,
        headers: list[tuple[bytes, bytes]],
        span: Span = INVALID_SPAN,
    ) -> None:
        """`watched` and `span` end with this attempt."""
        self._client = client
        self._watched = watched
        self._base_url = base_url
        self._request = request
        self._headers = headers
        self._span = span
        self._incoming: IncomingAnswer | None = None

    async def __aenter__(self) -> Answer:
        request, watched, clock = self._request, self._watched, AnswerClock(lateness=self._client.lateness)
        try:
            url = _url(self._base_url, request)
            self._incoming = await self._client.send(request.method, url, self._headers, request.body)
            try:
                answer = await _read_start(self._incoming, clock, watched, self._base_url, self._span)
            except EngineLost as error:
                raise EngineUnreachable(f"{self._base_url}: {error}", connected=True) from error
            watched.reading = False
        except BaseException as error:
            self._end(error)
            raise
        if self._span.is_recording():
            self._span.set_attribute("http.response.status_code", answer.status)
            if answer.status >= 400:
                self._span.set_attribute("error.type", str(answer.status))
                self._span.set_status(Status(StatusCode.ERROR))
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Raise EngineStalled in place of a cancellation by the monitor."""
        if self._incoming is not None:
            self._incoming.close()
        if isinstance(error, asyncio.CancelledError):
            if self._watched.took_cancellation():
                self._watched.end()
                stalled = EngineStalled(f"{self._base_url}: the engine makes no progress")
                self._end_span(stalled)
                raise stalled from error
            self._watched.leave()
        self._watched.end()
        self._end_span(error)

    def _end_span(self, error: BaseException | None) -> None:
        if isinstance(error, (EngineUnreachable, EngineLost)):
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


def _url(base_url: str, request: EngineRequest) -> str:
    url = base_url.rstrip("/") + request.path
    return f"{url}?{request.query.decode('latin-1')}" if request.query else url


async def _read_start(
    incoming: IncomingAnswer, clock: AnswerClock, watched: WatchedAttempt, base_url: str, span: Span
) -> Answer:
    watched.status = incoming.status
    headers = _without_other_places(incoming.headers, base_url)
    if not 200 <= incoming.status < 300 or is_json(headers):
        body = await incoming.read_all(watched.progress)
        clock.part()
        if incoming.may_be_cut and not _is_whole(headers, body):
            raise EngineLost("the connection ended before the answer")
        return WholeAnswer(incoming.status, headers, body, clock, span)
    if first := await incoming.read():
        watched.progress(first)
        return StreamedAnswer(incoming.status, headers, first, incoming, clock, watched, can_be_read(headers), span)
    return WholeAnswer(incoming.status, headers, b"", clock, span)


def _without_other_places(headers: RawHeaders, base_url: str) -> RawHeaders:
    """The headers, with an engine's redirect to itself reduced to the path, since clients only know the router's address. A
    redirect to anywhere else is removed, since clients would send their keys there."""
    kept = []
    for name, value in headers:
        if name.lower() == b"location":
            value = value.removeprefix(base_url.rstrip("/").encode())
            if not _OWN_PATH.match(value):
                continue
        kept.append((name, value))
    return kept


def _is_whole(headers: RawHeaders, body: bytes) -> bool:
    """False for a JSON text that is cut off."""
    if not (body and is_json(headers) and header_value(headers, b"content-encoding") in (b"", b"identity")):
        return True
    try:
        decode(body)
    except ValueError:
        return False
    return True
