"""The simulated engine's other APIs: their streams have the same content as their whole answers, and rendering shows what is
computed."""

import json
from typing import Any

import pytest

from kvatlas_router.tokens import Api
from tests.router.apis import TURNS, body_of
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


async def test_a_streamed_message_is_the_whole_one_in_pieces() -> None:
    async with running_engine() as (_, client):
        body = body_of(Api.MESSAGES, output_tokens=3)
        whole = (await client.post(Api.MESSAGES, json=body)).json()
        answer = await client.post(Api.MESSAGES, json={**body, "stream": True})
        assert [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        said = events(answer.text)
        text = "".join(event["delta"]["text"] for event in said if event["type"] == "content_block_delta")
        assert whole["content"] == [{"type": "text", "text": text}] and whole["stop_reason"] == "max_tokens"
        usage = said[-2]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole["usage"]["input_tokens"]
        assert usage["cache_read_input_tokens"] > 0 and usage["output_tokens"] == 3


async def test_a_streamed_response_is_the_whole_one_in_pieces() -> None:
    async with running_engine() as (_, client):
        body = body_of(Api.RESPONSES, output_tokens=3)
        whole = (await client.post(Api.RESPONSES, json=body)).json()
        said = events((await client.post(Api.RESPONSES, json={**body, "stream": True})).text)
        text = "".join(event["delta"] for event in said if event["type"] == "response.output_text.delta")
        assert whole["output"][0]["content"][0]["text"] == text
        assert (said[0]["type"], said[-1]["type"]) == ("response.created", "response.incomplete")
        done = said[-1]["response"]
        assert (done["status"], done["usage"]["input_tokens"]) == ("incomplete", whole["usage"]["input_tokens"])
        assert [event["sequence_number"] for event in said] == list(range(len(said)))


async def test_generate_says_the_text_so_far_and_token_ids_the_new_ones() -> None:
    async with running_engine(enable_scale_out=True) as (_, client):
        body = body_of(Api.GENERATE, output_tokens=3)
        whole = (await client.post(Api.GENERATE, json=body)).json()
        said = events((await client.post(Api.GENERATE, json={**body, "stream": True})).text)
        assert [len(event["output_ids"]) for event in said] == [1, 2, 3]
        assert said[-1]["text"] == whole["text"] and said[-1]["meta_info"]["finish_reason"]["type"] == "length"
        body = body_of(Api.TOKENS, output_tokens=3)
        ids = (await client.post(Api.TOKENS, json=body)).json()["choices"][0]["token_ids"]
        said = events((await client.post(Api.TOKENS, json={**body, "stream": True})).text)
        assert ids == whole["output_ids"] == [id for event in said for id in event["choices"][0]["token_ids"]]


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT, Api.MESSAGES, Api.RESPONSES])
async def test_rendering_says_what_the_call_computes_and_is_off_by_default(api: Api) -> None:
    async with running_engine() as (_, client):
        assert (await client.post(f"{api}/render", json=body_of(api))).status_code == 404
        assert (await client.post(Api.TOKENS, json=body_of(Api.TOKENS))).status_code == 404
    async with running_engine(enable_scale_out=True) as (_, client):
        rendered = (await client.post(f"{api}/render", json=body_of(api))).json()
        tokens = (rendered[0] if api is Api.COMPLETIONS else rendered)["token_ids"]
        assert tokens == body_of(Api.TOKENS)["token_ids"]


async def test_what_depends_on_a_model_is_refused_in_one_line() -> None:
    async with running_engine() as (_, client):
        body = {**body_of(Api.MESSAGES), "messages": [{"role": "system", "content": TURNS[0][1]}]}
        answer = await client.post(Api.MESSAGES, json=body)
        assert answer.status_code == 400 and "a message of role 'system'" in answer.json()["error"]["message"]
