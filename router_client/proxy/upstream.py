"""One try on one engine: its answer from the first byte on, or why another engine should be tried."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from kvatlas.errors import KvatlasError
from router_client.learning.timings import AnswerClock

FULL = (503,)
"""vLLM and SGLang answer so when their queue is full, or while they stop."""

AWAY = (502, 504)
"""What stands between us and the engine answers so when the engine is away."""


class EngineRefused(KvatlasError):
    """The engine takes no request now; `answer` is what it said."""

    def __init__(self, line: str, answer: "WholeAnswer") -> None:
        super().__init__(line)
        self.answer = answer


class EngineUnreachable(KvatlasError):
    """The engine did not answer, or went away before its first byte. `connected`: it took the request."""

    def __init__(self, line: str, *, connected: bool) -> None:
        super().__init__(line)
        self.connected = connected


class EngineLost(KvatlasError):
    """The engine went away in mid-answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an engine is sent."""

    path: str
    query: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is complete. `clock`: when it came."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    clock: AnswerClock = field(default_factory=AnswerClock, compare=False)


@dataclass(slots=True)
class StreamedAnswer:
    """An answer whose first bytes are there. `chunks` raises EngineLost. `clock`: when they came, and what followed."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    clock: AnswerClock

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.first
        try:
            async for chunk in self.rest:
                self.clock.part()
                yield chunk
        except httpx.HTTPError as error:
            raise EngineLost(f"the engine went away in mid-answer: {error or type(error).__name__}") from error


Answer = WholeAnswer | StreamedAnswer


@asynccontextmanager
async def ask(
    client: httpx.AsyncClient, base_url: str, question: Question, headers: list[tuple[bytes, bytes]]
) -> AsyncIterator[Answer]:
    """Send a question and give the answer; leaving the block closes the connection where it is not over yet.

    An event stream is given from its first bytes on, anything else when it is complete. Raises EngineRefused for an
    engine that is full, and EngineUnreachable for one that is away.
    """
    url = httpx.URL(base_url.rstrip("/") + question.path)
    if question.query:
        url = url.copy_with(query=question.query)
    clock = AnswerClock()
    try:
        request = client.build_request("POST", url, content=question.body, headers=headers)
        response = await client.send(request, stream=True)
    except httpx.HTTPError as error:
        connected = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        raise EngineUnreachable(f"{base_url}: {error or type(error).__name__}", connected=connected) from error
    try:
        try:
            answer = await _begin(response, clock)
        except httpx.HTTPError as error:
            line = f"{base_url}: {error or type(error).__name__}"
            raise EngineUnreachable(line, connected=True) from error
        if isinstance(answer, WholeAnswer) and answer.status in FULL + AWAY:
            raise EngineRefused(f"{base_url}: status {answer.status}", answer)
        yield answer
    finally:
        await response.aclose()


async def _begin(response: httpx.Response, clock: AnswerClock) -> Answer:
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
