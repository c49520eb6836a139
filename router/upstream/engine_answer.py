"""One try on one engine: its answer from the first byte on, or why there is none."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from opentelemetry.trace import INVALID_SPAN, Span

from kvatlas.errors import KvatlasError
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import can_be_read, header_value
from kvatlas_router.upstream.engine_watch import EngineWatch, WatchedTry
from router_client.learning.timings import AnswerClock


class EngineRefused(KvatlasError):
    """The engine does not answer this request; `answer` is what it says instead."""

    def __init__(self, line: str, answer: "WholeAnswer") -> None:
        super().__init__(line)
        self.answer = answer


class EngineUnreachable(KvatlasError):
    """The engine did not answer, or went away before its first byte. `connected`: it accepted the connection."""

    def __init__(self, line: str, *, connected: bool) -> None:
        super().__init__(line)
        self.connected = connected


class EngineLost(KvatlasError):
    """The engine went away in mid-answer."""


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
    rest: AsyncIterator[bytes]
    clock: AnswerClock
    watched: WatchedTry
    events: bool = True
    span: Span = INVALID_SPAN

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineLost."""
        yield self.first
        try:
            async for chunk in self.rest:
                self.watched.progress()
                yield chunk
        except httpx.HTTPError as error:
            raise EngineLost(f"the engine went away in mid-answer: {str(error) or type(error).__name__}") from error


Answer = WholeAnswer | StreamedAnswer

_OF_BODY = {b"content-type", b"content-encoding", b"cache-control", b"x-accel-buffering"}


def error_refusal(url: str, error: EngineError, answer: Answer) -> EngineRefused:
    """A good answer that is an error, as an engine's refusal with the status that the error stands for."""
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _OF_BODY]
    whole = WholeAnswer(error.status, [*headers, (b"content-type", b"application/json")], error.body, answer.clock)
    return EngineRefused(f"{url}: an error in its answer: {error.line}", whole)


@asynccontextmanager
async def send_to_engine(
    client: httpx.AsyncClient,
    watch: EngineWatch,
    base_url: str,
    request: EngineRequest,
    headers: list[tuple[bytes, bytes]],
) -> AsyncIterator[Answer]:
    """`async with send_to_engine(...) as answer`; leaving the block before the answer's end closes the connection.

    Answers of any status. A good one that is not JSON is given from its first bytes on, any other when it is complete. Raises
    EngineUnreachable for an engine that is away, and EngineLost out of the block if it hangs in mid-answer.
    """
    with watch.watch(base_url) as watched:
        response: httpx.Response | None = None
        began = False
        try:
            try:
                clock = AnswerClock()
                response = await client.send(_build(client, base_url, request, headers), stream=True)
                answer = await _read_start(response, clock, watched, base_url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                connected = not isinstance(
                    error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
                )
                line = f"{base_url}: {str(error) or type(error).__name__}"
                raise EngineUnreachable(line, connected=connected) from error
            began = True
            yield answer
        except asyncio.CancelledError as error:
            if not watched.took_cancellation():
                raise
            if began:
                raise EngineLost("the engine hangs in mid-answer") from error
            raise EngineUnreachable(f"{base_url}: the engine hangs", connected=True) from error
        finally:
            if response is not None:
                await response.aclose()


def _build(
    client: httpx.AsyncClient, base_url: str, request: EngineRequest, headers: list[tuple[bytes, bytes]]
) -> httpx.Request:
    url = httpx.URL(base_url.rstrip("/") + request.path)
    if request.query:
        url = url.copy_with(query=request.query)
    return client.build_request(request.method, url, content=request.body or None, headers=headers)


async def _read_start(response: httpx.Response, clock: AnswerClock, watched: WatchedTry, base_url: str) -> Answer:
    headers = [
        (name, _relative(value, base_url) if name.lower() == b"location" else value)
        for name, value in response.headers.raw
    ]
    if not response.is_success or header_value(headers, b"content-type").startswith(b"application/json"):
        parts = []
        async for part in response.aiter_raw():
            watched.progress()
            parts.append(part)
        clock.part()
        return WholeAnswer(response.status_code, headers, b"".join(parts), clock)
    rest = response.aiter_raw()
    async for first in rest:
        watched.progress()
        return StreamedAnswer(response.status_code, headers, first, rest, clock, watched, can_be_read(headers))
    return WholeAnswer(response.status_code, headers, b"", clock)


def _relative(location: bytes, base_url: str) -> bytes:
    """Where an engine redirects to on itself, without its address: that is the router's business."""
    return location.removeprefix(base_url.rstrip("/").encode())
