"""Completions and chats over HTTP, whole and streamed, as vLLM answers them."""

import json
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from tests.simulator.http.conversation import MESSAGES, TEXT
from tests.simulator.running_engine import running_engine, scrape_metrics, wait_for_requests

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 310))


async def events_of(response: httpx.Response) -> list[Any]:
    lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_has_its_tokens_and_the_number_of_cached_ones() -> None:
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


async def test_the_next_turn_hits_the_blocks_of_the_last_prompt_and_answer() -> None:
    async with running_engine() as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 7, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=request)).json()["choices"][0]["token_ids"]
        next_turn = {"prompt": [*PROMPT, *answer, 1, 2], "max_tokens": 1}
        usage = (await client.post("/v1/completions", json=next_turn)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16


async def test_the_tokens_of_a_text_are_its_bytes() -> None:
    async with running_engine() as (_, client):
        for prompt in ("a block", list(b"a block")):
            body = (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})).json()
        assert body["usage"]["prompt_tokens"] == 7 and body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_a_stream_has_one_event_per_token_and_the_usage_last() -> None:
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


async def test_a_chat_is_answered_with_a_message_and_counts_the_tokens_of_its_text() -> None:
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
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""} and all(
            list(delta) == ["content"] for delta in deltas[1:]
        )
        assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_full_queue_is_answered_with_503_and_is_freed_when_clients_disconnect() -> None:
    async with running_engine(max_num_seqs=1, queue_limit=1, speed_up=0.001) as (_, client):
        async with anyio.create_task_group() as tasks:
            for number in (1, 2):
                tasks.start_soon(partial(client.post, "/v1/completions", json={"prompt": [number]}))
                await wait_for_requests(client, running=1, waiting=number - 1)
            response = await client.post("/v1/completions", json={"prompt": [3]})
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["message"] == "1 requests are waiting; expected fewer than 1"
            tasks.cancel_scope.cancel()
        await wait_for_requests(client, running=0)


async def test_a_request_is_aborted_if_the_client_of_its_stream_disconnects() -> None:
    async with running_engine(speed_up=1) as (_, client):
        request = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                assert line.startswith("data: ")
                break
        await wait_for_requests(client, running=0)
        assert (await scrape_metrics(client))["vllm:generation_tokens_total"][0] < 200
