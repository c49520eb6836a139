"""One try on one engine: its answer from the first byte on, or why there is none."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from kvatlas.errors import KvatlasError
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import can_be_read, is_json
from kvatlas_router.progress.watched_try import WatchedTry
from kvatlas_router.upstream.engine_client import EngineClient, EngineLost, EngineUnreachable, IncomingAnswer
from router_client.learning.timings import AnswerClock


class EngineRefused(KvatlasError):
    """The engine does not answer this request; `answer` is what it says instead."""

    def __init__(self, line: str, answer: "WholeAnswer") -> None:
        super().__init__(line)
        self.answer = answer


class EngineStalled(EngineUnreachable):
    """The engine makes no progress; the request leaves it before its first byte."""

    def __init__(self, line: str) -> None:
        super().__init__(line, connected=True)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it is sent to an engine. `path`: as the client wrote it, percent-encoded."""

    method: str
    path: str
    query: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is complete. `clock`: when it arrived. `span`: of the try that it answers."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    clock: AnswerClock = field(default_factory=AnswerClock, compare=False)
    span: Span = field(default=INVALID_SPAN, compare=False)


@dataclass(slots=True)
class StreamedAnswer:
    """An answer whose first bytes are there. `clock`: started with the request; the reader of the answer counts its parts
    there. `events`: is it a stream of server-sent events that can be read? `span`: of the try that it answers."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: bytes
    rest: IncomingAnswer
    clock: AnswerClock
    watched: WatchedTry
    events: bool = True
    span: Span = INVALID_SPAN

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineLost."""
        yield self.first
        while chunk := await self.rest.read():
            self.watched.progress(chunk)
            yield chunk


Answer = WholeAnswer | StreamedAnswer

_OF_BODY = {b"content-type", b"content-encoding", b"cache-control", b"x-accel-buffering"}


def error_refusal(url: str, error: EngineError, answer: Answer) -> EngineRefused:
    """A good answer that is an error, as an engine's refusal with the status that the error stands for."""
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _OF_BODY]
    whole = WholeAnswer(error.status, [*headers, (b"content-type", b"application/json")], error.body, answer.clock)
    return EngineRefused(f"{url}: an error in its answer: {error.line}", whole)


@asynccontextmanager
async def send_to_engine(
    client: EngineClient,
    watch: AbstractContextManager[WatchedTry],
    base_url: str,
    request: EngineRequest,
    headers: list[tuple[bytes, bytes]],
) -> AsyncIterator[Answer]:
    """`async with send_to_engine(...) as answer`; leaving the block before the answer's end closes the connection.

    Answers of any status. A good one that is not JSON is given from its first bytes on, any other when it is complete. Raises
    EngineUnreachable for an engine that is away, EngineStalled if `watch` gives it up, and EngineLost out of the block for that
    in mid-answer.
    """
    with watch as watched:
        incoming: IncomingAnswer | None = None
        began = False
        try:
            clock = AnswerClock()
            incoming = await client.send(request.method, _url(base_url, request), headers, request.body)
            try:
                answer = await _read_start(incoming, clock, watched, base_url)
            except EngineLost as error:
                raise EngineUnreachable(f"{base_url}: {error}", connected=True) from error
            began = True
            yield answer
        except asyncio.CancelledError as error:
            if not watched.took_cancellation():
                raise
            if began:
                raise EngineLost("the engine hangs in mid-answer") from error
            raise EngineStalled(f"{base_url}: the engine makes no progress") from error
        finally:
            if incoming is not None:
                incoming.close()


def _url(base_url: str, request: EngineRequest) -> str:
    url = base_url.rstrip("/") + request.path
    return f"{url}?{request.query.decode('latin-1')}" if request.query else url


async def _read_start(incoming: IncomingAnswer, clock: AnswerClock, watched: WatchedTry, base_url: str) -> Answer:
    watched.status = incoming.status
    headers = [
        (name, _relative(value, base_url) if name.lower() == b"location" else value) for name, value in incoming.headers
    ]
    if not 200 <= incoming.status < 300 or is_json(headers):
        parts = []
        while part := await incoming.read():
            watched.progress(part)
            parts.append(part)
        clock.part()
        return WholeAnswer(incoming.status, headers, b"".join(parts), clock)
    if first := await incoming.read():
        watched.progress(first)
        return StreamedAnswer(incoming.status, headers, first, incoming, clock, watched, can_be_read(headers))
    return WholeAnswer(incoming.status, headers, b"", clock)


def _relative(location: bytes, base_url: str) -> bytes:
    """Where an engine redirects to on itself, without its address: that is the router's business."""
    return location.removeprefix(base_url.rstrip("/").encode())
