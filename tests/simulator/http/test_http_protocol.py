"""The HTTP side as a client, a router and a sidecar see it."""

import json
import time
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.errors import SettingsError
from simulator.service import run_engine
from tests.eventually import until
from tests.simulator.running_engine import engine_settings, running_engine

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 310))


async def metrics(client: httpx.AsyncClient) -> dict[str, tuple[float, dict[str, str]]]:
    response = await client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def events_of(response: httpx.Response) -> list[Any]:
    lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_tells_its_tokens_and_what_came_from_the_cache() -> None:
    async with running_engine() as (_, client):
        request = {"model": "mock-model", "prompt": PROMPT, "max_tokens": 3, "return_token_ids": True, "temperature": 0}
        first, second = [(await client.post("/v1/completions", json=request)).json() for _ in range(2)]
        assert first["object"] == "text_completion" and first["model"] == "mock-model"
        (choice,) = first["choices"]
        assert len(choice["token_ids"]) == 3 and choice["prompt_token_ids"] == PROMPT
        assert choice["finish_reason"] == "length"
        assert choice["text"] == "".join(f" t{token}" for token in choice["token_ids"])
        assert first["usage"] == {
            "prompt_tokens": 10,
            "total_tokens": 13,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert second["choices"] == first["choices"] and second["id"] != first["id"]
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_a_next_turn_finds_prompt_and_answer_of_the_turn_before() -> None:
    async with running_engine() as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 7, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=request)).json()["choices"][0]["token_ids"]
        next_turn = {"prompt": [*PROMPT, *answer, 1, 2], "max_tokens": 1}
        usage = (await client.post("/v1/completions", json=next_turn)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_text_is_its_bytes() -> None:
    async with running_engine() as (_, client):
        for prompt in ("a block", list(b"a block")):
            body = (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})).json()
        assert body["usage"]["prompt_tokens"] == 7 and body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_a_stream_gives_token_by_token_and_its_usage_last() -> None:
    async with running_engine() as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "return_token_ids": True}
        whole = (await client.post("/v1/completions", json=request)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json={**request, **options}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            *chunks, last = await events_of(response)
        assert len(chunks) == 6 and all("usage" not in chunk for chunk in chunks)
        for index, choice in enumerate(whole["choices"]):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [token for each in own for token in each["token_ids"]] == choice["token_ids"]
            assert "".join(each["text"] for each in own) == choice["text"]
            assert [each["finish_reason"] for each in own] == [None, None, "length"]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_adapters_are_models_of_their_own_that_share_no_blocks() -> None:
    async with running_engine(adapters="sql,chat") as (_, client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("mock-model", None),
            ("sql", "mock-model"),
            ("chat", "mock-model"),
        ]
        assert cards[0]["max_model_len"] == 256
        cached = []
        for model in ("mock-model", "sql", "sql", "chat"):
            response = await client.post("/v1/completions", json={"model": model, "prompt": PROMPT, "max_tokens": 1})
            assert response.json()["model"] == model
            cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 8, 0]


async def test_metrics_have_vllms_names() -> None:
    before = time.time()
    async with running_engine(model="m") as (_, client):
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        found = await metrics(client)
        labels = {"engine": "0", "model_name": "m"}
        assert found["vllm:num_requests_running"] == (0, labels)
        assert found["vllm:num_requests_waiting"] == (0, labels)
        assert found["vllm:kv_cache_usage_perc"] == (0, labels)
        assert found["vllm:prefix_cache_queries_total"] == (20, labels)
        assert found["vllm:prefix_cache_hits_total"] == (8, labels)
        value, config = found["vllm:cache_config_info"]
        assert value == 1 and (config["block_size"], config["num_gpu_blocks"]) == ("4", "64")
        assert before - 1 <= found["process_start_time_seconds"][0] <= time.time()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "the body is not JSON"),
        ("[]", 400, "the body is a JSON list; expected an object"),
        ("{}", 400, "prompt is missing"),
        ('{"prompt": []}', 400, "prompt is []; expected one text, or one list of token ids, not empty"),
        ('{"prompt": ["a", "b"]}', 400, "expected one text, or one list of token ids"),
        ('{"prompt": [1, true]}', 400, "expected one text, or one list of token ids"),
        ('{"prompt": [5, 32000]}', 400, "prompt has token id 32000; expected 0 to 31999"),
        ('{"prompt": [-1]}', 400, "prompt has token id -1"),
        ('{"prompt": "a", "max_tokens": 0}', 400, "max_tokens is 0; expected at least 1"),
        ('{"prompt": "a", "max_tokens": "5"}', 400, "max_tokens is '5'; expected an integer"),
        ('{"prompt": "a", "max_tokens": 256}', 400, "need 257 slots; expected at most 256"),
        ('{"prompt": "a", "n": 1000}', 400, "n is 1000; expected at most 256"),
        ('{"prompt": "a", "cache_salt": "\\ud800"}', 400, "cache_salt is '\\ud800'; expected text in UTF-8"),
        ('{"prompt": "\\ud800"}', 400, "prompt is '\\ud800'; expected text without lone surrogates"),
        ('{"prompt": "a", "model": "other"}', 404, "the model 'other' does not exist; expected one of mock-model"),
    ],
)
async def test_a_bad_body_is_one_clear_line(body: str, status: int, message: str) -> None:
    async with running_engine() as (_, client):
        response = await client.post("/v1/completions", content=body)
        error = response.json()["error"]
        assert response.status_code == status == error["code"]
        assert message in error["message"] and "\n" not in error["message"]


async def test_unknown_paths_and_flags_are_json_errors_too() -> None:
    async with running_engine() as (_, client):
        assert (await client.get("/nope")).json()["error"]["code"] == 404
        assert (await client.get("/v1/completions")).json()["error"]["code"] == 405
        response = await client.post("/reset_prefix_cache", params={"reset_external": "maybe"})
        assert response.json()["error"]["message"] == "reset_external is 'maybe'; expected true or false"


async def test_a_full_queue_is_answered_with_503_and_a_freed_one_is_not() -> None:
    async with running_engine(max_num_seqs=1, queue_limit=1, speed_up=0.001) as (_, client):
        async with anyio.create_task_group() as tasks:
            for number in (1, 2):
                tasks.start_soon(partial(client.post, "/v1/completions", json={"prompt": [number]}))
                state = (1.0, float(number - 1))

                async def seen(wanted: tuple[float, float] = state) -> bool:
                    found = await metrics(client)
                    return (found["vllm:num_requests_running"][0], found["vllm:num_requests_waiting"][0]) == wanted

                await until(seen, what=f"running and waiting requests to be {state}")
            response = await client.post("/v1/completions", json={"prompt": [3]})
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["message"] == "1 requests are waiting; expected fewer than 1"
            tasks.cancel_scope.cancel()

        async def idle() -> bool:
            found = await metrics(client)
            return not found["vllm:num_requests_running"][0] and not found["vllm:num_requests_waiting"][0]

        await until(idle, what="requests of clients that left to be given up")


async def test_a_stream_whose_client_leaves_is_given_up() -> None:
    async with running_engine(speed_up=1) as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                assert line.startswith("data: ")
                break

        async def idle() -> bool:
            return (await metrics(client))["vllm:num_requests_running"][0] == 0

        await until(idle, what="the request to be given up")
        assert (await metrics(client))["vllm:generation_tokens_total"][0] < 200


async def test_a_reset_is_refused_while_requests_run_unless_they_may_be_preempted() -> None:
    async with running_engine(speed_up=0.1) as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            await anext(response.aiter_lines())
            refused = await client.post("/reset_prefix_cache")
            assert refused.status_code == 409 and "running requests hold blocks" in refused.json()["error"]["message"]
            params = {"reset_running_requests": "true", "reset_external": "true"}
            assert (await client.post("/reset_prefix_cache", params=params)).status_code == 200


async def test_an_engine_asleep_has_dropped_its_cache_and_answers_when_it_is_awake() -> None:
    async with running_engine() as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 1}
        await client.post("/v1/completions", json=request)
        assert (await client.get("/kv_blocks")).json()["blocks"]
        assert (await client.post("/sleep?level=1")).is_success
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.get("/kv_blocks")).json()["blocks"] == []
        page = (await client.get("/metrics")).text
        assert 'vllm:engine_sleep_state{engine="0",model_name="mock-model",sleep_state="awake"} 0.0' in page
        async with anyio.create_task_group() as tasks:
            answers: list[httpx.Response] = []

            async def ask() -> None:
                answers.append(await client.post("/v1/completions", json=request))

            tasks.start_soon(ask)
            await until(lambda: _waiting(client), what="the request waits")
            assert not answers
            await client.post("/wake_up")
        assert answers[0].is_success


async def _waiting(client: httpx.AsyncClient) -> bool:
    return (await metrics(client))["vllm:num_requests_waiting"][0] == 1


async def test_an_engine_that_stops_ends_open_answers_and_frees_its_ports() -> None:
    statuses = []

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as own:
            statuses.append((await own.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50})).status_code)

    async with anyio.create_task_group() as tasks, running_engine(speed_up=0.01) as (addresses, client):
        tasks.start_soon(ask, addresses.base_url)

        async def runs() -> bool:
            return (await metrics(client))["vllm:num_requests_running"][0] == 1

        await until(runs, what="the request to run")
    assert statuses == [503]
    port = int(addresses.base_url.rpartition(":")[2])
    async with running_engine(port=port, endpoint=addresses.endpoint, replay_endpoint=addresses.replay_endpoint) as (
        again,
        _,
    ):
        assert again == addresses


async def test_a_port_in_use_is_one_clear_line() -> None:
    async with running_engine() as (addresses, _):
        port = int(addresses.base_url.rpartition(":")[2])
        with pytest.raises(SettingsError, match=f"can't listen on 127.0.0.1:{port}: Address already in use"):
            await run_engine(engine_settings(port=port))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": 0}, "--block-size is 0; expected"),
        ({"eviction": "mru"}, "--eviction is 'mru'; expected"),
        ({"model": "m", "adapters": "a,a"}, "--adapters is 'a,a'; expected names that differ"),
        ({"speed_up": 0}, "--speed-up is 0; expected"),
        ({"endpoint": "5557"}, "--endpoint is '5557'; expected a URL"),
    ],
)
async def test_a_wrong_flag_is_one_clear_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        engine_settings(**flags)
    assert str(caught.value).startswith(message)
