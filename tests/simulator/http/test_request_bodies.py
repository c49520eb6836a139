"""A wrong request body gives one clear line."""

from typing import Any

import pytest

from tests.simulator.http.conversation import MESSAGES
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


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
async def test_a_wrong_body_is_refused_in_one_clear_line(body: str, status: int, message: str) -> None:
    async with running_engine() as (_, client):
        response = await client.post("/v1/completions", content=body)
        error = response.json()["error"]
        assert response.status_code == status == error["code"]
        assert message in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
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
async def test_a_wrong_chat_is_refused_in_one_clear_line(
    path: str, body: dict[str, Any], status: int, message: str
) -> None:
    async with running_engine() as (_, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == status and message in answer.json()["error"]["message"]
