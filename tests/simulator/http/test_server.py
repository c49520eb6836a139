"""The other routes: models, tokens, event sources, cache reset, sleep; and unknown ones."""

import anyio
import httpx
import pytest

from kvatlas_simulator.http.chat_template import render
from tests.simulator.http.conversation import MESSAGES, TEXT, TOOLS
from tests.simulator.running_engine import running_engine, wait_for_requests

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 310))


async def test_adapters_are_listed_as_models_and_share_no_blocks() -> None:
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


async def test_tokenize_returns_the_tokens_of_a_prompt_or_a_chat() -> None:
    async with running_engine() as (_, client):
        for body, text in (
            ({"prompt": "a block"}, "a block"),
            ({"model": "mock-model", "messages": MESSAGES}, TEXT),
            ({"messages": MESSAGES, "tools": TOOLS}, render(MESSAGES, TOOLS)),
            ({"messages": MESSAGES, "add_generation_prompt": False}, TEXT.removesuffix("<|assistant|>\n")),
        ):
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer["tokens"] == list(text.encode()) and answer["count"] == len(answer["tokens"])


async def test_version_and_event_sources_are_reported() -> None:
    async with running_engine() as (addresses, client):
        assert (await client.get("/kv_event_sources")).json() == {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": addresses.endpoint,
                "replay_endpoint": addresses.replay_endpoint,
                "topic": "",
            }
        }
        assert (await client.get("/version")).json() == {"version": "0.33.0"}


async def test_unknown_paths_and_wrong_flags_are_json_errors() -> None:
    async with running_engine() as (_, client):
        assert (await client.get("/nope")).json()["error"]["code"] == 404
        assert (await client.get("/v1/completions")).json()["error"]["code"] == 405
        response = await client.post("/reset_prefix_cache", params={"reset_external": "maybe"})
        assert response.json()["error"]["message"] == "reset_external is 'maybe'; expected true or false"


async def test_a_reset_is_refused_while_requests_run_unless_they_may_be_preempted() -> None:
    async with running_engine(speed_up=0.1) as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            await anext(response.aiter_lines())
            refused = await client.post("/reset_prefix_cache")
            assert refused.status_code == 409 and "running requests hold blocks" in refused.json()["error"]["message"]
            params = {"reset_running_requests": "true", "reset_external": "true"}
            assert (await client.post("/reset_prefix_cache", params=params)).status_code == 200


async def test_a_sleeping_engine_has_an_empty_cache_and_answers_after_it_wakes_up() -> None:
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

            async def post_completion() -> None:
                answers.append(await client.post("/v1/completions", json=request))

            tasks.start_soon(post_completion)
            await wait_for_requests(client, running=0, waiting=1)
            assert not answers
            await client.post("/wake_up")
        assert answers[0].is_success
