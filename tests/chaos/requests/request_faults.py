"""Requests through two routers while one of four engines fails in a realistic way: what is lost, and which engines got the
traffic."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import monotonic

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvatlas.store.connection import Store
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, faulty_engine, in_turn, status, well

REQUESTS = 120
AT_ONCE = 8
SLOW_S = 0.2


async def lie(_: Request) -> Response:
    """An answer with an impossible usage."""
    usage = {"prompt_tokens": -5, "completion_tokens": 1 << 62, "prompt_tokens_details": {"cached_tokens": "many"}}
    return JSONResponse({"choices": [{"index": 0, "text": "a"}], "usage": usage})


async def die(_: Request) -> Response:
    """A stream that breaks off in the middle of an event."""

    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: {"cho'
        raise ConnectionResetError("this engine dies here")

    return StreamingResponse(events(), media_type="text/event-stream")


async def slow(request: Request) -> Response:
    """A good answer, late."""
    await asyncio.sleep(SLOW_S)
    return await well(request)


def says(*events: bytes) -> Answer:
    """A stream of these events, or without any the same error as a body of JSON."""

    async def answer(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for event in events:
                yield event

        return StreamingResponse(body(), media_type="text/event-stream") if events else JSONResponse(ERROR)

    return answer


async def die_behind_a_comment(_: Request) -> Response:
    """A stream that keeps the connection alive, and breaks off before any content."""

    async def events() -> AsyncIterator[bytes]:
        yield COMMENT
        raise ConnectionResetError("this engine dies here")

    return StreamingResponse(events(), media_type="text/event-stream")


ERROR = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
ERROR_EVENT = b"data: " + json.dumps(ERROR).encode() + b"\n\n"
COMMENT = b": keep-alive\n\n"
PART = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


async def hang(_: Request) -> Response:
    """Send no byte: the device hangs, and the HTTP server does not notice."""
    await asyncio.Event().wait()
    raise AssertionError


FAULTS: dict[str, Answer] = {
    "500": status(500),
    "429": status(429),
    "401": status(401),
    "flaky": in_turn(status(500), well),
    "lies": lie,
    "dies": die,
    "slow": slow,
    "says an error": says(COMMENT, ERROR_EVENT, b"data: [DONE]\n\n"),
    "says an error in JSON": says(),
    "says an error late": says(PART, ERROR_EVENT, b"data: [DONE]\n\n"),
    "dies behind a comment": die_behind_a_comment,
    "hangs": hang,
    "busy": slow,
    "is well, clients dribble": well,
}
STREAMED = frozenset({"dies", "says an error", "says an error late", "dies behind a comment"})
BREAKS = frozenset({"dies", "says an error late"})
"""Faults after the first content: another engine must then continue the answer."""
WITHOUT_HEALTH = {"busy"}
"""Engines whose status pages wait until they have computed other work."""


DRIBBLED = frozenset({"is well, clients dribble"})
DRIBBLERS = 60
"""Number of additional clients whose bodies never end."""


@dataclass(slots=True)
class Figures:
    """`lost`: requests without an answer. `broken`: streams that ended with an error event. `times_s`: of each request.
    `tries`: the number of requests that the bad worker had got, at the beginning and after each request."""

    lost: list[str] = field(default_factory=list)
    broken: int = 0
    answered: int = 0
    times_s: list[float] = field(default_factory=list)
    tries: list[int] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        return max(self.times_s)

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    @property
    def share_before(self) -> float:
        """The bad worker's requests per request of the first third, most of which came before it was ejected."""
        return self._share(0, self._requests // 3)

    @property
    def share_after(self) -> float:
        """The same for the last third, when it is ejected and only probed."""
        return self._share(2 * self._requests // 3, self._requests)

    @property
    def _requests(self) -> int:
        return len(self.tries) - 1

    def _share(self, first: int, last: int) -> float:
        return (self.tries[last] - self.tries[first]) / max(1, last - first)


async def drive(
    clients: Sequence[httpx.AsyncClient], asked: "Counter[str]", bad: str, *, streamed: bool, requests: int = REQUESTS
) -> Figures:
    """Send `requests` requests, AT_ONCE at a time, over the routers in turn."""
    figures, numbers = Figures(), count()
    figures.tries.append(asked[bad])

    async def ask() -> None:
        while (number := next(numbers)) < requests:
            body = {"model": MODEL, "prompt": [number, 7, *range(40)], "max_tokens": 1, "stream": streamed}
            began = monotonic()
            try:
                answer = await clients[number % len(clients)].post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                figures.lost.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                figures.times_s.append(monotonic() - began)
                figures.tries.append(asked[bad])
            if answer.status_code != 200:
                figures.lost.append(f"{answer.status_code}: {answer.text[:200]}")
            elif streamed and ('"error"' in answer.text or not answer.text.endswith("data: [DONE]\n\n")):
                assert '"error"' in answer.text
                figures.broken += 1
            else:
                figures.answered += 1

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return figures


async def dribble(client: httpx.AsyncClient) -> None:
    """Send a body byte by byte, without end."""
    host, port = client.base_url.host, client.base_url.port
    _, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)
    except ConnectionError:
        pass  # it was refused
    finally:
        writer.close()


async def run(
    store: Store, redis_url: str, fault: str, requests: int = REQUESTS, continue_answers: str = "off"
) -> Figures:
    """Run with four engines, the first of which has the fault."""
    bad, healthy = FAULTS.get(fault, well), fault not in WITHOUT_HEALTH
    asked: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for number in range(4):
            worker_id = f"w{number}"

            async def answer(request: Request, worker_id: str = worker_id, number: int = number) -> Response:
                asked[worker_id] += 1
                return await (bad if number == 0 else well)(request)

            engine = await stack.enter_async_context(faulty_engine(answer, healthy=healthy or number > 0))
            await fleet.report(worker_id, engine.url)
        clients = [
            await stack.enter_async_context(
                running_proxy(redis_url, learn=False, access_log=False, continue_answers=continue_answers)
            )
            for _ in range(2)
        ]
        number = DRIBBLERS if fault in DRIBBLED else 0
        dribblers = [asyncio.create_task(dribble(clients[turn % len(clients)])) for turn in range(number)]
        try:
            return await drive(clients, asked, "w0", streamed=fault in STREAMED, requests=requests)
        finally:
            for dribbler in dribblers:
                dribbler.cancel()
            await asyncio.gather(*dribblers, return_exceptions=True)
