"""Chats and tokens over HTTP, as vLLM answers them."""

import json
from typing import Any

import pytest

from simulator.http.chat_template import render
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a block?"}]},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
TEXT = "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is\na block?<|end|>\n<|assistant|>\n"


async def test_a_chat_is_answered_as_a_message_and_counts_the_tokens_of_its_text() -> None:
    async with running_engine() as (_, client):
        body: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 3, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant" and choice["prompt_token_ids"] == list(TEXT.encode())
        assert answer["usage"]["prompt_tokens"] == len(TEXT) and answer["usage"]["completion_tokens"] == 3
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = (await client.post("/v1/chat/completions", json=body)).text.strip().split("\n\n")
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == choice["message"]["content"]
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_the_tokens_of_a_request_can_be_asked_for() -> None:
    async with running_engine() as (_, client):
        for body, text in (
            ({"prompt": "a block"}, "a block"),
            ({"model": "mock-model", "messages": MESSAGES}, TEXT),
            ({"messages": MESSAGES, "tools": TOOLS}, render(MESSAGES, TOOLS)),
            ({"messages": MESSAGES, "add_generation_prompt": False}, TEXT.removesuffix("<|assistant|>\n")),
        ):
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer["tokens"] == list(text.encode()) and answer["count"] == len(answer["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "expected a role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "expected a role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1]}]}, 400, "expected a role"),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}, 404, "does not exist"),
        ("/tokenize", {"prompt": [1, 2]}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt is missing"),
    ],
)
async def test_a_wrong_chat_is_refused_in_one_line(path: str, body: dict[str, Any], status: int, said: str) -> None:
    async with running_engine() as (_, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == status and said in answer.json()["error"]["message"]


async def test_an_engine_tells_where_its_events_are() -> None:
    async with running_engine() as (addresses, client):
        assert (await client.get("/kv_event_sources")).json() == [
            {
                "data_parallel_rank": 0,
                "endpoint": addresses.endpoint,
                "replay_endpoint": addresses.replay_endpoint,
                "topic": "",
            }
        ]
        assert (await client.get("/version")).json() == {"version": "0.33.0"}
