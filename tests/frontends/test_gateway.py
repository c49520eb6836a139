"""The picker behind Envoy, with the engines' own servers."""

import httpx
import pytest

from tests.frontends.answers import said
from tests.frontends.bodies import API_NAMES, CHATS, apis
from tests.frontends.test_tokens import check_prediction


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", API_NAMES)
def test_every_api_answers_as_the_engine_does(
    gateway: httpx.Client, engine: httpx.Client, model: str, api: str, stream: bool
) -> None:
    if api not in apis(model):
        pytest.skip(f"the engine of {model} has no such API")
    path, body = apis(model)[api]
    expected, answer = (one.post(path, json={**body, "stream": stream}) for one in (engine, gateway))
    cumulative = path == "/generate"
    assert said(answer, cumulative=cumulative) == said(expected, cumulative=cumulative)
    assert answer.status_code == 200


@pytest.mark.parametrize("api", API_NAMES)
def test_every_api_is_predicted_exactly(gateway: httpx.Client, model: str, api: str) -> None:
    if api not in apis(model):
        pytest.skip(f"the engine of {model} has no such API")
    check_prediction(gateway, *apis(model)[api])


@pytest.mark.parametrize("form", ["tools", "reasoning-effort", "kwargs", "json-schema"])
def test_a_chat_is_predicted_exactly(gateway: httpx.Client, model: str, form: str) -> None:
    check_prediction(gateway, "/v1/chat/completions", {"model": model, **CHATS[form]})
