"""Through the router, clients get what the engines' own servers answer."""

from typing import Any

import httpx
import pytest

from tests.frontends.answers import said
from tests.frontends.bodies import API_NAMES, CHATS, apis, asks


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", API_NAMES)
def test_every_api_answers_as_the_engine_does(
    router: httpx.Client, engine: httpx.Client, model: str, api: str, stream: bool
) -> None:
    if api not in apis(model):
        pytest.skip(f"the engine of {model} has no such API")
    path, body = apis(model)[api]
    expected = engine.post(path, json={**body, "stream": stream})
    answer = router.post(path, json={**body, "stream": stream})
    assert expected.status_code == 200, expected.text
    cumulative = path == "/generate"
    assert said(answer, cumulative=cumulative) == said(expected, cumulative=cumulative)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", CHATS)
def test_every_form_of_a_chat_is_answered_as_the_engine_does(
    router: httpx.Client, engine: httpx.Client, model: str, form: str, stream: bool
) -> None:
    body = {"model": model, **CHATS[form], "stream": stream}
    expected, answer = engine.post("/v1/chat/completions", json=body), router.post("/v1/chat/completions", json=body)
    assert said(answer) == said(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": "hello"},
        {"messages": []},
        {"max_tokens": -1},
        {"temperature": -3},
        {"messages": [{"role": "user", "content": "x " * 150_000}]},
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"response_format": {"type": "json_schema"}},
    ],
    ids=["number", "no list", "empty", "tokens", "temperature", "too long", "no such tool", "no schema"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_wrong_request_is_refused_as_by_the_engine(
    router: httpx.Client, engine: httpx.Client, model: str, change: dict[str, Any], stream: bool
) -> None:
    body = {"model": model, **asks(), "stream": stream, **change}
    expected, answer = engine.post("/v1/chat/completions", json=body), router.post("/v1/chat/completions", json=body)
    assert answer.status_code == expected.status_code
    if "x-kvatlas-decision" in answer.headers:
        assert answer.text == expected.text, "in the engine's own words, unless the router refused it"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/tokenize", "/v1/messages/count_tokens"])
def test_what_is_no_prompt_is_answered_too(router: httpx.Client, engine: httpx.Client, model: str, path: str) -> None:
    if path in ("/tokenize", "/v1/messages/count_tokens"):
        body = {"model": model, **asks()}
        body.pop("max_tokens")
        expected, answer = engine.post(path, json=body), router.post(path, json=body)
    else:
        expected, answer = engine.get(path), router.get(path)
    assert answer.status_code == expected.status_code
