"""Engines that answer their status pages but compute nothing, and engines that compute for long and answer no status page."""

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.store.connection import Store
from kvatlas_router.progress.expected_times import Bounds
from tests.eventually import until
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, well
from tests.router.proxy.test_proxy import decision, status

pytestmark = pytest.mark.anyio

PREFIX = list(range(64))
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


def body(number: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [*PREFIX, number], "max_tokens": 2, "stream": bool(number % 2), **more}


async def ask(client: httpx.AsyncClient, number: int, **more: Any) -> str:
    """Send a request that must succeed. Returns the worker that answered."""
    answer = await client.post("/v1/completions", json=body(number, **more))
    assert answer.status_code == 200, answer.text
    assert "usage" in answer.text or answer.text.endswith("data: [DONE]\n\n"), answer.text
    return decision(answer)[0]


async def is_stalled(client: httpx.AsyncClient, *workers: str) -> bool:
    return set((await status(client))["stalled"]) == set(workers)


async def warm_up(client: httpx.AsyncClient) -> None:
    """Send requests until it is known how long answers take here."""
    for number in range(30):
        await ask(client, number)


async def test_a_hung_engine_loses_no_request_is_named_and_comes_back_by_itself(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_bounds(monkeypatch, unknown_s=60)
    async with (
        running_fleet(store, {"w0": {}, "w1": {}, "w2": {}, "w3": {}}) as fleet,
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        await warm_up(client)
        await fleet.holds("w0", PREFIX)  # it attracts all of these prompts
        await fleet.clients["w0"].post("/hang")
        assert (await fleet.clients["w0"].get("/health")).status_code == 200
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(ask, client, number)
        # another may be suspected for a moment on a busy machine: it is probed and comes back
        await until(partial(is_stalled, client, "w0"), what="w0 alone is stalled")
        told = await status(client)
        assert told["ejected"] == {} and any("worker w0 is stalled" in line for line in told["findings"])
        assert told["progress"]["moved"] > 0 and told["proxy"]["gave_up"] == told["proxy"]["broken"] == 0
        assert "stalled workers" in (await client.get("/")).text
        assert sum("worker w0 is stalled" in line for line in caplog.messages) == 1
        assert "w0" not in {await ask(client, number) for number in range(10)}
        await fleet.clients["w0"].post("/resume")
        await until(partial(is_stalled, client), what="the engine is back")

        async def gets_requests() -> bool:
            return "w0" in {await ask(client, number, prompt=[number] * 64) for number in range(100, 108)}

        await until(gets_requests, what="it gets requests again")


@pytest.mark.parametrize(("alone", "mispredicted"), [(True, False), (False, False), (False, True)])
async def test_an_engine_whose_health_page_waits_behind_a_prompt_keeps_everything(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, alone: bool, mispredicted: bool
) -> None:
    """As SGLang's does, in the middle of answers. The prompt takes longer than any status page may take. `mispredicted`: it
    also takes far longer than predicted; the engine then counts as stalled, but still nothing is cut."""
    monkeypatch.setattr("kvatlas_router.progress.expected_times.LEAST_SUSPECT_S", 0.5)
    if mispredicted:
        monkeypatch.setattr("kvatlas_router.progress.expected_times.PREDICTION_S", (0.01, 0.1))
        monkeypatch.setattr("kvatlas_router.progress.expected_times.UNKNOWN_S", 0.4)
        monkeypatch.setattr("kvatlas_router.progress.engine_progress.BEGUN", Bounds(0.2, 0.4))
    slow = {
        "prefill_us_per_token": 8_000,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks": 4_096,
        "speed_up": 1.0,
        "health_waits": True,
    }
    workers = {"w0": slow} if alone else {"w0": slow, "w1": slow}
    async with (
        running_fleet(store, workers) as fleet,
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(partial(ask, client, number, max_tokens=300, stream=True))
            await until(lambda: _has_begun(client, 4), what="they run")
            tasks.start_soon(partial(ask, client, 9, prompt=list(range(1_000, 1_600)), stream=True))
        told = await status(client)
        assert told["ejected"] == {} and (told["proxy"]["broken"], told["proxy"]["gave_up"]) == (0, 0)
        if mispredicted:
            assert told["progress"]["stalls"] > 0
        else:
            assert (told["stalled"], told["progress"]["stalls"], told["proxy"]["retried"]) == ({}, 0, 0)
        for worker in fleet.clients.values():
            assert (await worker.get("/health")).status_code == 200


async def _has_begun(client: httpx.AsyncClient, answers: int) -> bool:
    return int((await status(client))["proxy"]["answered"]) >= answers


async def slow_answer(request: Request) -> Response:
    """Answer later than impatient clients wait."""
    await anyio.sleep(0.4)
    return await well(request)


async def test_impatient_clients_eject_no_engine(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_bounds(monkeypatch, unknown_s=4)
    async with (
        faulty_engine(slow_answer) as engine,
        running_fleet(store, {}, {"w0": {"url": engine.url}}),
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        for number in range(40):
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/completions", json=body(number), timeout=0.05)
            told = await status(client)
            assert told["stalled"] == told["ejected"] == {}
        await until(lambda: _was_probed(client), what="it is probed")
        assert (await status(client))["progress"]["stalls"] == 0


async def _was_probed(client: httpx.AsyncClient) -> bool:
    return bool((await status(client))["progress"]["probes"])


async def keep_alives(_: Request) -> Response:
    """Send comments like a server that waits for its engine; they are not progress."""

    async def comments() -> AsyncIterator[bytes]:
        while True:
            yield b": keep-alive\n\n"
            await anyio.sleep(0.05)

    return StreamingResponse(comments(), media_type="text/event-stream")


async def test_comments_of_a_server_are_no_progress(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_bounds(monkeypatch)
    async with (
        faulty_engine(keep_alives) as engine,
        running_fleet(store, {}, {"w0": {"url": engine.url}}),
        running_proxy(valkey_url, tokenizer="none") as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(client.post, "/v1/completions", json=body(1)))
        await until(partial(is_stalled, client, "w0"), what="it is found")
        tasks.cancel_scope.cancel()


async def test_without_budget_a_request_waits_where_it_is(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_bounds(monkeypatch)
    monkeypatch.setattr("kvatlas_router.ejection.retry_budget.RetryBudget.take", lambda _: False)
    async with (
        running_fleet(store, {"w0": {}, "w1": {}}) as fleet,
        running_proxy(valkey_url, tokenizer="none") as client,
        anyio.create_task_group() as tasks,
    ):
        await fleet.holds("w0", PREFIX)
        await fleet.clients["w0"].post("/hang")
        monkeypatch.setattr("kvatlas_router.progress.engine_progress.CUT_S", 60)
        answered: list[str] = []

        async def wait_for_answer() -> None:
            answered.append(await ask(client, 1))

        tasks.start_soon(wait_for_answer)
        await until(partial(is_stalled, client, "w0"), what="it is found")
        assert not answered and (await status(client))["progress"]["moved"] == 0
        await fleet.clients["w0"].post("/resume")
        await until(lambda: answered, what="it is answered")
        assert answered == ["w0"]


async def test_an_engine_that_dies_in_every_answer_breaks_one_stream_a_trial(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_router.ejection.pool_ejections.EJECT_S", 0.2)
    monkeypatch.setattr("kvatlas_router.ejection.pool_ejections.MOST_EJECT_S", 0.2)
    monkeypatch.setattr("kvatlas_router.ejection.monitor.EVERY_S", 0.1)  # how often a router asks whether it may try

    async def die(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield EVENT
            raise ConnectionResetError("this engine dies here")

        return StreamingResponse(events(), media_type="text/event-stream")

    async with (
        faulty_engine(die) as dying,
        faulty_engine(well) as good,
        running_fleet(store, {}, {"w0": {"url": dying.url}, "w1": {"url": good.url}}) as fleet,
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        numbers = count(1, 2)

        async def ask_the_dying() -> httpx.Response:
            """The dying engine holds each prompt, and the other one none."""
            prompt = [number := next(numbers)] * 64
            await fleet.holds("w0", prompt)
            return await client.post("/v1/completions", json=body(number, prompt=prompt))

        while dying.asked < 8:
            assert (await ask_the_dying()).status_code == 200
        told = await status(client)
        assert told["outliers"]["readmissions"] == 0
        assert told["proxy"]["broken"] == dying.asked
        assert told["outliers"]["ejections"] == dying.asked - 2  # three failures, and then each trial
        dying.answer = well

        async def is_readmitted() -> bool:
            await ask_the_dying()
            return not (await status(client))["ejected"]

        await until(is_readmitted, what="it is readmitted by a whole answer")
