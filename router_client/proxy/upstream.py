"""One try on one engine: its answer from the first byte on, or why another engine should be tried."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from kvatlas.errors import KvatlasError
from router_client.learning.timings import AnswerClock

FULL = (503,)
"""Status of vLLM and SGLang when their queue is full, or while they stop."""

AWAY = (502, 504)
"""Status of a gateway between proxy and engine when the engine is away."""


class EngineRefused(KvatlasError):
    """The engine takes no request now; `answer` is its answer."""

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
    """A request as it is sent to an engine."""

    path: str
    query: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is complete. `clock`: when it arrived."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    clock: AnswerClock = field(default_factory=AnswerClock, compare=False)


@dataclass(slots=True)
class StreamedAnswer:
    """An answer whose first bytes are there. `clock`: when they and the following ones arrived."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    clock: AnswerClock

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineLost."""
        yield self.first
        try:
            async for chunk in self.rest:
                self.clock.part()
                yield chunk
        except httpx.HTTPError as error:
            raise EngineLost(f"the engine went away in mid-answer: {error or type(error).__name__}") from error


Answer = WholeAnswer | StreamedAnswer


@asynccontextmanager
async def send_to_engine(
    client: httpx.AsyncClient, base_url: str, request: EngineRequest, headers: list[tuple[bytes, bytes]]
) -> AsyncIterator[Answer]:
    """`async with send_to_engine(...) as answer`; leaving the block before the answer's end closes the connection.

    An event stream is given from its first bytes on, any other answer when it is complete. Raises EngineRefused for an
    engine that is full, and EngineUnreachable for one that is away.
    """
    url = httpx.URL(base_url.rstrip("/") + request.path)
    if request.query:
        url = url.copy_with(query=request.query)
    clock = AnswerClock()
    try:
        built = client.build_request("POST", url, content=request.body, headers=headers)
        response = await client.send(built, stream=True)
    except httpx.HTTPError as error:
        connected = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        raise EngineUnreachable(f"{base_url}: {error or type(error).__name__}", connected=connected) from error
    try:
        try:
            answer = await _read_start(response, clock)
        except httpx.HTTPError as error:
            line = f"{base_url}: {error or type(error).__name__}"
            raise EngineUnreachable(line, connected=True) from error
        if isinstance(answer, WholeAnswer) and answer.status in FULL + AWAY:
            raise EngineRefused(f"{base_url}: status {answer.status}", answer)
        yield answer
    finally:
        await response.aclose()


async def _read_start(response: httpx.Response, clock: AnswerClock) -> Answer:
    kind = response.headers.get("content-type", "")
    headers = response.headers.raw
    if response.status_code != 200 or not kind.startswith("text/event-stream"):
        body = await response.aread()
        clock.part()
        return WholeAnswer(response.status_code, headers, body, clock)
    rest = response.aiter_raw()
    async for first in rest:
        clock.part()
        return StreamedAnswer(response.status_code, headers, first, rest, clock)
    return WholeAnswer(response.status_code, headers, b"")
