"""Requests through two routers while engines fail in every way that engines do: what is lost, and who got the traffic."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvatlas.store.connection import Store, open_store
from tests.router_client.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router_client.proxy.faulty_engine import Answer, faulty_engine, in_turn, status, well
from tests.router_client.proxy.raw_engine import HEAD, chunk, raw_engine, silent_engine

pytestmark = pytest.mark.anyio

REQUESTS = 120
AT_ONCE = 8


async def lie(_: Request) -> Response:
    """Usage that no engine could mean."""
    usage = {"prompt_tokens": -5, "completion_tokens": 1 << 62, "prompt_tokens_details": {"cached_tokens": "many"}}
    return JSONResponse({"choices": [{"index": 0, "text": "a"}], "usage": usage})


async def die(_: Request) -> Response:
    """A stream that breaks off in the middle of an event."""

    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: {"cho'
        raise ConnectionResetError("this engine dies here")

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    store = await open_store(fresh_valkey, wait=False)
    yield store
    await store.close()


@dataclass(slots=True)
class Figures:
    """`lost`: requests without an answer. `broken`: streams that ended with an error event. `share_before`, `share_after`:
    of the bad worker's requests, of all in the first and in the last third. `longest_s`: the slowest request."""

    lost: list[str] = field(default_factory=list)
    broken: int = 0
    answered: int = 0
    longest_s: float = 0.0
    tries: list[int] = field(default_factory=list)

    def share(self, first: int, last: int) -> float:
        return (self.tries[last] - self.tries[first]) / max(1, last - first)


async def drive(clients: list[httpx.AsyncClient], asked: "Counter[str]", bad: str, *, streamed: bool) -> Figures:
    """REQUESTS requests, AT_ONCE at a time, over the routers in turn."""
    figures, numbers = Figures(), count()
    figures.tries.append(asked[bad])

    async def ask() -> None:
        while (number := next(numbers)) < REQUESTS:
            body = {"model": MODEL, "prompt": [number, 7, *range(40)], "max_tokens": 1, "stream": streamed}
            began = monotonic()
            try:
                answer = await clients[number % len(clients)].post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                figures.lost.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                figures.longest_s = max(figures.longest_s, monotonic() - began)
                figures.tries.append(asked[bad])
            if answer.status_code != 200:
                figures.lost.append(f"{answer.status_code}: {answer.text[:200]}")
            elif streamed and not answer.text.endswith("data: [DONE]\n\n"):
                last = json.loads(answer.text.strip().rpartition("\n\n")[2].removeprefix("data: "))
                assert "error" in last
                figures.broken += 1
            else:
                figures.answered += 1

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return figures


FAULTS: dict[str, Answer] = {
    "500": status(500),
    "429": status(429),
    "401": status(401),
    "flaky": in_turn(status(500), well),
    "lies": lie,
    "dies": die,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_is_lost_to_one_bad_engine_of_four(store: Store, valkey_url: str, fault: str) -> None:
    figures = await run(store, valkey_url, FAULTS[fault], streamed=fault == "dies")
    early, late = figures.share(0, REQUESTS // 3), figures.share(2 * REQUESTS // 3, REQUESTS)
    print(
        f"{fault}: {len(figures.lost)} lost, {figures.broken} broken, slowest {figures.longest_s * 1_000:.0f} ms; "
        f"tries at the bad worker: {early:.0%} of the first third's requests, {late:.0%} of the last third's"
    )
    assert figures.lost == []
    if fault == "dies":
        assert figures.answered + figures.broken == REQUESTS and figures.broken <= 12
    else:
        assert figures.answered == REQUESTS
    if fault != "lies":  # its answers are good ones
        assert late <= 0.1


async def run(store: Store, valkey_url: str, bad: Answer, *, streamed: bool) -> Figures:
    asked: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for number in range(4):
            worker_id = f"w{number}"

            async def answer(request: Request, worker_id: str = worker_id, number: int = number) -> Response:
                asked[worker_id] += 1
                return await (bad if number == 0 else well)(request)

            engine = await stack.enter_async_context(faulty_engine(answer))
            await fleet.report(worker_id, engine.url)
        clients = [
            await stack.enter_async_context(running_proxy(valkey_url, learn=False, access_log=False)) for _ in range(2)
        ]
        return await drive(clients, asked, "w0", streamed=streamed)


@pytest.mark.parametrize("first", [None, b"", HEAD + chunk(b'data: {"choices": []}\n\n')[:-4]])
async def test_no_request_is_lost_to_an_engine_that_is_away_or_hangs(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, first: bytes | None
) -> None:
    monkeypatch.setattr("router_client.proxy.service.PATIENCE_S", 0.2)
    monkeypatch.setattr("router_client.upstream.engine_watch.PROBE_S", 0.2)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        rude = await stack.enter_async_context(raw_engine(b"") if first is None else silent_engine(first))
        await fleet.report("w0", rude.url)
        for number in range(1, 4):
            await fleet.report(f"w{number}", (await stack.enter_async_context(faulty_engine(well))).url)
        client = await stack.enter_async_context(running_proxy(valkey_url, learn=False, access_log=False))
        figures = await drive([client], Counter(), "w0", streamed=True)
        assert figures.lost == [] and figures.answered + figures.broken == REQUESTS
        assert figures.broken <= (AT_ONCE * 3 if first else 0)
