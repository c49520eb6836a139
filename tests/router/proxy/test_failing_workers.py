"""Engines that fail fast: their requests are answered elsewhere, they get none for a while, and what they did not compute does
not count as cached."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.ejection import EjectionStore
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.eventually import until
from tests.router.proxy.engines import MODEL, SCOPE, Fleet, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, FaultyEngine, faulty_engine, in_turn, status, well
from tests.router.proxy.test_proxy import PROMPT, decision
from tests.router.proxy.test_proxy import status as proxy_status

pytestmark = pytest.mark.anyio


def body(number: int = 0, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": [number + 1, *PROMPT], "max_tokens": 1, **more}


async def three_engines(stack: AsyncExitStack, store: Store, first: object) -> tuple[Fleet, list[FaultyEngine]]:
    """Three workers; the first one's engine always answers with `first`."""
    fleet = await stack.enter_async_context(running_fleet(store, {}))
    engines = []
    for number, answer in enumerate((first, well, well)):
        engines.append(await stack.enter_async_context(faulty_engine(answer)))  # type: ignore[arg-type]
        await fleet.report(f"w{number}", engines[-1].url)
    return fleet, engines


@pytest.mark.parametrize("answer", [status(500), status(503), status(429), status(429, retry_after="0"), status(401)])
async def test_a_worker_that_fails_fast_draws_no_traffic(store: Store, valkey_url: str, answer: Answer) -> None:
    async with AsyncExitStack() as stack:
        _, engines = await three_engines(stack, store, answer)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        for number in range(60):
            assert (await client.post("/v1/completions", json=body(number))).status_code == 200
        assert 1 <= engines[0].asked <= 12
        counted = await proxy_status(client)
        assert counted["ejected"].keys() == {"w0"} and counted["outliers"]["ejections"] >= 1
        assert counted["proxy"]["answered"] == 60


async def test_an_ejection_is_known_to_all_routers_and_a_well_answered_try_ends_it(
    store: Store, valkey_url: str
) -> None:
    async with AsyncExitStack() as stack:
        _, engines = await three_engines(stack, store, status(500))
        one = await stack.enter_async_context(running_proxy(valkey_url))
        other = await stack.enter_async_context(running_proxy(valkey_url))
        assert (await other.post("/v1/completions", json=body())).status_code == 200

        async def is_ejected(client: httpx.AsyncClient) -> bool:
            return bool((await proxy_status(client))["ejected"].keys() == {"w0"})

        for number in range(30):
            await one.post("/v1/completions", json=body(number))
        await until(lambda: is_ejected(other), what="the other router knows")
        engines[0].answer = well
        asked, numbers = engines[0].asked, count(100)

        async def is_readmitted() -> bool:
            await other.post("/v1/completions", json=body(next(numbers)))
            return not (await proxy_status(other))["ejected"]

        await until(is_readmitted, what="an attempt was answered")
        assert engines[0].asked > asked

        async def is_readmitted_everywhere() -> bool:
            return not (await proxy_status(one))["ejected"]

        await until(is_readmitted_everywhere, what="the first router knows")
        records = await EjectionStore(store).exchange(SCOPE.pool_id, "reader", [])
        assert records["w0"].left_s is None and records["w0"].times == 1


async def test_an_ejected_worker_counts_while_the_fleet_has_it(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet, engines = await three_engines(stack, store, status(500))
        client = await stack.enter_async_context(running_proxy(valkey_url))
        for number in range(30):
            await client.post("/v1/completions", json=body(number))

        async def ejected() -> set[str]:
            return set((await proxy_status(client))["ejected"])

        assert await ejected() == {"w0"}
        await FleetStore(store).forget("w0", SCOPE.pool_id)

        async def has_left() -> bool:
            return not await ejected()

        await until(has_left, what="it counts no more")
        await fleet.report("w0", engines[0].url)

        async def is_back() -> bool:
            return await ejected() == {"w0"}

        await until(is_back, what="it is known that it fails")


async def test_a_worker_that_alone_refuses_what_others_answer_is_found_out(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        _, engines = await three_engines(stack, store, status(400))
        client = await stack.enter_async_context(running_proxy(valkey_url))
        answers = [(await client.post("/v1/completions", json=body(number))).status_code for number in range(60)]
        assert answers.count(200) + answers.count(400) == 60
        assert answers.count(400) <= 3 and 400 not in answers[-30:]
        assert 3 <= engines[0].asked <= 12
        counted = await proxy_status(client)
        assert counted["ejected"].keys() == {"w0"} and counted["outliers"]["ejections"] >= 1


async def test_a_mistake_of_the_client_says_nothing_about_workers(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        _, engines = await three_engines(stack, store, well)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        for engine in engines:
            engine.answer = status(401)
        for number in range(20):
            answer = await client.post("/v1/completions", json=body(number))
            assert answer.status_code == 401 and answer.json()["error"]["message"] == "status 401"
            assert decision(answer)[1]["attempt"] == "2"
        for engine in engines:
            engine.answer = status(400)
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 400 and decision(answer)[1]["attempt"] == "1"
        counted = await proxy_status(client)
        assert (counted["ejected"], counted["outliers"]["bad"], counted["proxy"]["refused_by_engine"]) == ({}, 0, 21)


async def test_a_pool_that_fails_as_a_whole_is_not_ejected_and_not_asked_again_and_again(
    store: Store, valkey_url: str
) -> None:
    async with AsyncExitStack() as stack:
        _, engines = await three_engines(stack, store, status(500))
        engines[1].answer = engines[2].answer = status(500)
        client = await stack.enter_async_context(running_proxy(valkey_url, max_attempts=3))
        for number in range(100):
            answer = await client.post("/v1/completions", json=body(number))
            assert answer.status_code == 500
        counted = await proxy_status(client)
        assert len(counted["ejected"]) <= 1 and counted["proxy"]["retries_denied"] > 50
        assert sum(engine.asked for engine in engines) < 230  # 300 without a budget


async def test_retry_after_is_honoured(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet, engines = await three_engines(stack, store, status(429, retry_after="9"))
        client = await stack.enter_async_context(running_proxy(valkey_url))
        await fleet.holds("w0", PROMPT)
        answer = await client.post("/v1/completions", json=body(prompt=PROMPT))
        assert decision(answer)[1]["attempt"] == "2"
        for _ in range(5):
            assert (await client.post("/v1/completions", json=body(prompt=PROMPT))).status_code == 200
        assert engines[0].asked == 1
        engines[1].answer = engines[2].answer = status(503, retry_after="7")
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        asked = [engine.asked for engine in engines]
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 7
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert [engine.asked for engine in engines] == asked


@pytest.mark.parametrize("code", [400, 500])
async def test_a_prompt_that_was_refused_is_not_believed_cached(store: Store, valkey_url: str, code: int) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engine = await stack.enter_async_context(faulty_engine(in_turn(status(code), well)))
        await fleet.report("w0", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        # the simulated fleet's steps are 8 blocks of 4 tokens
        long = list(range(400, 800))
        assert (await client.post("/v1/completions", json=body(prompt=long))).status_code == code
        answer = await client.post("/v1/completions", json=body(prompt=long))
        assert answer.status_code == 200 and decision(answer)[1]["cached"] == "0"
        answer = await client.post("/v1/completions", json=body(prompt=long))
        assert answer.status_code == code and int(decision(answer)[1]["cached"]) > 0


async def test_the_callers_own_rank_header_does_not_reach_the_engine(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engine = await stack.enter_async_context(faulty_engine(well))
        await fleet.report("w0", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        headers = {"X-Data-Parallel-Rank": "7", "X-Other": "kept"}
        assert (await client.post("/v1/completions", json=body(), headers=headers)).status_code == 200
        (request,) = engine.requests
        assert "x-data-parallel-rank" not in request.headers and request.headers["x-other"] == "kept"


async def test_a_client_that_leaves_at_the_event_that_ends_its_stream_is_not_gone(
    store: Store, valkey_url: str
) -> None:
    left = anyio.Event()

    async def late_end(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: [DONE]\n\n'
            await left.wait()

        return StreamingResponse(events(), media_type="text/event-stream")

    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engine = await stack.enter_async_context(faulty_engine(late_end))
        await fleet.report("w0", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        async with client.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
        for _ in range(10):  # the router notices that the client disconnected
            await proxy_status(client)
        left.set()

        async def is_over() -> bool:
            return bool((await proxy_status(client))["in_flight"] == 0)

        await until(is_over, what="the request is over")
        counted = (await proxy_status(client))["proxy"]
        assert (counted["answered"], counted["gone"]) == (1, 0)


async def test_a_stream_read_to_its_end_is_answered_and_not_gone(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engine = await stack.enter_async_context(faulty_engine(well))
        await fleet.report("w0", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        for _ in range(10):
            answer = await client.post("/v1/completions", json=body(stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
        counted = (await proxy_status(client))["proxy"]
        assert (counted["answered"], counted["gone"]) == (10, 0)
