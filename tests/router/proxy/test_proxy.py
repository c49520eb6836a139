"""The proxy over HTTP, in front of simulated engines, with a real store."""

import asyncio
import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_router.proxy import exchange
from kvatlas_router.proxy.request_router import RequestRouter
from kvatlas_router.proxy.worker_attempts import WorkerAttempts
from kvatlas_simulator.http.chat_template import render
from tests.eventually import until
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.tokens.small_model import save_simulators

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 340))
MESSAGES = [{"role": "system", "content": "Be brief, and tell who holds it."}, {"role": "user", "content": "Who?"}]
NOTHING_LISTENS = "http://127.0.0.1:1"


def decision(answer: httpx.Response) -> tuple[str, dict[str, str]]:
    """(worker, parameters) of the decision header."""
    header = answer.headers["x-kvatlas-decision"]
    found = re.fullmatch(r'"([^"]+)"((?:;[a-z-]+=[A-Za-z0-9_]+)*)', header)
    assert found, header
    return found[1], dict(part.split("=", 1) for part in found[2].split(";") if part)


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get("/status")).json()
    return answer


async def requests_are(engine: httpx.AsyncClient, gauge: str, number: int) -> bool:
    """True if the engine has this many running (or waiting) requests."""
    page = (await engine.get("/metrics")).text
    found = re.search(rf"^vllm:num_requests_{gauge}\{{.*\}} (.*)$", page, re.MULTILINE)
    assert found
    return float(found[1]) == number


async def test_a_completion_goes_to_the_worker_that_holds_its_prompt(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}, "w3": {}}) as fleet, running_proxy(valkey_url) as client:
        for worker_id in ("w3", "w1", "w2"):
            prompt = [*worker_id.encode(), 5, 6, *PROMPT]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "return_token_ids": True}
            direct = (await fleet.clients[worker_id].post("/v1/completions", json=body)).json()
            await fleet.holds(worker_id, prompt)
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["choices"] == direct["choices"]
            worker, parameters = decision(answer)
            assert worker == worker_id
            assert (parameters["cached"], parameters["prompt"], parameters["attempt"], parameters["by"]) == (
                "40",
                "44",
                "1",
                "cost",
            )
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
        counted = await status(client)
        answers = counted["answers"]
        assert (counted["tokens"]["given"], answers["prompts_equal"], answers["cached_equal"]) == (3, 3, 3)
        assert (await status(client))["findings"] == []


@pytest.mark.parametrize("tokenizer", ["engine", "local"])
async def test_a_chat_is_tokenized_and_goes_to_the_worker_that_holds_it(
    store: Store, valkey_url: str, tmp_path: Path, tokenizer: str
) -> None:
    chosen = "engine" if tokenizer == "engine" else str(save_simulators(tmp_path))
    async with (
        running_fleet(store, {"w1": {}, "w2": {}}) as fleet,
        running_proxy(valkey_url, tokenizer=chosen, tokenizer_deadline_ms=20_000) as client,
    ):
        body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
        tokens = list(render(MESSAGES).encode())
        for worker_id in ("w2", "w1"):
            body["messages"] = [*MESSAGES, {"role": "user", "content": worker_id}]
            await fleet.holds(worker_id, list(render(body["messages"]).encode()))
            worker, parameters = decision(await client.post("/v1/chat/completions", json=body))
            assert worker == worker_id and int(parameters["prompt"]) > len(tokens)
        counted = await status(client)
        answers = counted["answers"]
        assert (counted["tokens"]["tokenized"], answers["prompts_equal"], answers["prompts_differ"]) == (2, 2, 0)


async def test_a_wrong_tokenizer_is_a_finding(store: Store, valkey_url: str, tmp_path: Path) -> None:
    folder = save_simulators(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with (
        running_fleet(store, {"w1": {}}),
        running_proxy(valkey_url, tokenizer=str(folder), tokenizer_deadline_ms=20_000) as client,
    ):
        answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
        assert answer.status_code == 200
        (finding,) = (await status(client))["findings"]
        assert "1 of 1 prompts differ" in finding


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_stream_passes_unchanged_and_has_its_usage_only_if_the_client_asks(
    store: Store, valkey_url: str, wanted: bool
) -> None:
    async with running_fleet(store, {"w1": {}}) as fleet, running_proxy(valkey_url) as client:
        body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "stream": True}
        if wanted:
            body["stream_options"] = {"include_usage": True}
        text = (await client.post("/v1/completions", json=body)).text
        direct = (await fleet.clients["w1"].post("/v1/completions", json=body)).text
        own, expected = (
            [json.loads(line[6:]) for line in each.split("\n\n") if line and line != "data: [DONE]"]
            for each in (text, direct)
        )
        assert [event["choices"] for event in own] == [event["choices"] for event in expected]
        assert text.endswith("data: [DONE]\n\n") and len(own) == (6 if wanted else 5)
        assert (await status(client))["answers"]["prompts_equal"] == 1


async def test_the_first_bytes_come_before_the_last_are_made(store: Store, valkey_url: str) -> None:
    slow = {"speed_up": 1, "decode_step_us": 50_000}
    async with running_fleet(store, {"w1": slow}), running_proxy(valkey_url) as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                assert line.startswith("data: {")
                break


async def test_an_engine_that_is_away_costs_only_another_try(store: Store, valkey_url: str) -> None:
    away = {"w2": {"url": NOTHING_LISTENS}}
    async with running_fleet(store, {"w1": {}, "w2": {}}, away) as fleet, running_proxy(valkey_url) as client:
        await fleet.holds("w2", PROMPT)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        worker, parameters = decision(await client.post("/v1/completions", json=body))
        assert (worker, parameters["attempt"]) == ("w1", "2")
        # for a while, no other request is sent there first
        worker, parameters = decision(await client.post("/v1/completions", json={**body, "stream": True}))
        assert (worker, parameters["attempt"]) == ("w1", "1")
        assert (await status(client))["proxy"]["unreachable"] == 1


async def test_a_request_leaves_a_full_engine_for_another(store: Store, valkey_url: str) -> None:
    full = {"queue_limit": 1, "max_num_seqs": 1, "speed_up": 0.001}
    async with running_fleet(store, {"w1": {}, "w2": full}) as fleet, running_proxy(valkey_url) as client:
        await fleet.holds("w2", PROMPT)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        async with anyio.create_task_group() as tasks:
            for i, gauge in enumerate(("running", "waiting")):
                post = partial(fleet.clients["w2"].post, json={**body, "prompt": [i + 500]})
                tasks.start_soon(post, "/v1/completions")
                await until(partial(requests_are, fleet.clients["w2"], gauge, 1), what=f"a request is {gauge}")
            worker, parameters = decision(await client.post("/v1/completions", json=body))
            assert (worker, parameters["attempt"]) == ("w1", "2")
            assert (await status(client))["proxy"]["refused"] == 1
            tasks.cancel_scope.cancel()


async def test_without_a_worker_left_the_client_gets_the_last_error(store: Store, valkey_url: str) -> None:
    away = {"w1": {"url": NOTHING_LISTENS}}
    async with running_fleet(store, {"w1": {}}, away), running_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "127.0.0.1:1" in answer.json()["error"]["message"]
        assert (await status(client))["proxy"]["gave_up"] == 1


async def test_engines_are_tried_once_more_if_none_can_be_connected_to(store: Store, valkey_url: str) -> None:
    reports = {"w1": {"url": NOTHING_LISTENS}, "w2": {"url": NOTHING_LISTENS}}
    async with running_fleet(store, {}, reports) as fleet, running_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT})
        assert answer.status_code == 503 and NOTHING_LISTENS in answer.json()["error"]["message"]
        assert (await status(client))["proxy"]["unreachable"] == 3 and fleet.urls == {}


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{", 400, "not JSON"),
        (b'{"model": "mock-model"}', 400, "prompt is None"),
        (b'{"model": "mock-model", "prompt": [-1]}', 400, "token id"),
        (b'{"model": "other", "prompt": "a"}', 404, "'other' does not exist"),
        (b'{"model": "mock-model", "prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
    ],
)
async def test_a_wrong_request_is_refused_as_engines_do(
    store: Store, valkey_url: str, body: bytes, code: int, said: str
) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", content=body)
        assert answer.status_code == code and said in answer.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_ends_its_request_at_the_engine(
    store: Store, valkey_url: str, streamed: bool
) -> None:
    slow = {"speed_up": 1, "decode_step_us": 100_000}
    async with running_fleet(store, {"w1": slow}) as fleet, running_proxy(valkey_url) as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 150, "stream": streamed}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, json=body), "/v1/completions")

            await until(partial(requests_are, fleet.clients["w1"], "running", 1), what="the engine runs the request")
            tasks.cancel_scope.cancel()
        await until(partial(requests_are, fleet.clients["w1"], "running", 0), what="the engine gave the request up")

        async def counted() -> bool:
            return bool((await status(client))["proxy"]["gone"] == 1)

        await until(counted, what="the proxy counted it")


async def test_a_request_that_swallows_its_cancellation_is_cancelled_again(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like libraries in which a result and a cancellation arrive together."""
    run, waits = WorkerAttempts.run, anyio.Event()

    async def swallow(self: WorkerAttempts, *args: Any) -> None:
        waits.set()
        with suppress(asyncio.CancelledError):
            await anyio.sleep_forever()
        await run(self, *args)

    monkeypatch.setattr(WorkerAttempts, "run", swallow)
    monkeypatch.setattr(exchange, "AGAIN_S", 0.1)
    slow = {"speed_up": 1, "decode_step_us": 100_000}
    async with running_fleet(store, {"w1": slow}) as fleet, running_proxy(valkey_url) as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 150}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, json=body), "/v1/completions")
            with anyio.fail_after(60):
                await waits.wait()
            tasks.cancel_scope.cancel()

        async def is_over() -> bool:
            return bool((await status(client))["in_flight"] == 0)

        await until(is_over, what="the request is over")
        counted = (await status(client))["proxy"]
        assert (counted["gone"], counted["answered"]) == (1, 0)
        assert await requests_are(fleet.clients["w1"], "running", 0)


async def test_adapters_are_found_by_their_name(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {"w1": {"adapters": "sql"}, "w2": {"adapters": "sql"}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w2", PROMPT, Scope(MODEL, MODEL, "sql"))
        await fleet.holds("w1", PROMPT)
        for model, expected in (("sql", "w2"), (MODEL, "w1")):
            answer = await client.post("/v1/completions", json={"model": model, "prompt": PROMPT})
            assert answer.json()["model"] == model and decision(answer)[0] == expected
        models = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in models] == [(MODEL, None), ("sql", MODEL)]


async def test_a_cache_salt_is_part_of_the_first_block(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}}) as fleet, running_proxy(valkey_url) as client:
        await fleet.holds("w2", PROMPT)
        body = {"model": MODEL, "prompt": PROMPT, "cache_salt": "secret"}
        assert decision(await client.post("/v1/completions", json=body))[1]["cached"] == "0"


async def test_a_request_without_a_tokenizer_is_routed_by_load(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url, tokenizer="none") as client:
        answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
        assert answer.status_code == 200 and "prompt" not in decision(answer)[1]
        assert (await status(client))["proxy"]["untokenized"] == 1


async def test_a_proxy_warms_up_before_it_is_ready_also_for_workers_that_come_later(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[int] = []
    warm_up = RequestRouter.warm_up

    async def counted(parts: RequestRouter) -> None:
        warmed.append(len(await parts.catalogue.records()))
        await warm_up(parts)

    monkeypatch.setattr(RequestRouter, "warm_up", counted)
    async with running_fleet(store, {}) as fleet, running_proxy(valkey_url) as client:
        assert (await client.get("/ready")).status_code == 503
        await fleet.report("w1", NOTHING_LISTENS)

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await until(is_ready, what="the proxy is ready")
        await is_ready()
        assert warmed == [0, 1]


async def test_probes_say_if_the_proxy_is_alive_and_ready(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/readyz")).json() == {"workers": 1, "draining": False, "full": False}
    await store.client.flushall()
    async with running_fleet(store, {}), running_proxy(valkey_url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert answer.status_code == 404
