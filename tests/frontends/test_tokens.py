"""The router's tokens are those that the engine computes, and those that it calls cached are those that the engine reuses."""

from typing import Any

import httpx
import pytest

from tests.eventually import until_sync
from tests.frontends.answers import decision, usage
from tests.frontends.bodies import API_NAMES, CHATS, DOCUMENTS, apis


def check_prediction(router: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Send the prompt twice: the router predicts as many tokens, and as many cached ones, as the engine reports."""

    def ask() -> tuple[tuple[int, int], tuple[int, int]]:
        answer = router.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return decision(answer), usage(answer)

    predicted, counted = ask()
    assert predicted[0] == counted[0]
    seen = [(predicted, counted)]

    def agree() -> bool:
        seen.append(ask())
        return seen[-1][0] == seen[-1][1] and seen[-1][1][1] > 0

    until_sync(agree, deadline_s=10, what=f"as much is reused as was predicted: {seen}")


@pytest.mark.parametrize("form", CHATS)
def test_a_chat_of_any_form_is_predicted_exactly(router: httpx.Client, model: str, form: str) -> None:
    check_prediction(router, "/v1/chat/completions", {"model": model, **CHATS[form]})


def test_documents_are_rendered(router: httpx.Client) -> None:
    check_prediction(router, "/v1/chat/completions", {"model": "vllm-small", **DOCUMENTS})


@pytest.mark.parametrize("api", API_NAMES)
def test_every_api_is_predicted_exactly(router: httpx.Client, model: str, api: str) -> None:
    if api not in apis(model):
        pytest.skip(f"the engine of {model} has no such API")
    check_prediction(router, *apis(model)[api])


@pytest.mark.parametrize("described", [{}, {"description": "Today's weather", "strict": True}], ids=["least", "most"])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_tools_of_other_apis_are_predicted_exactly(
    router: httpx.Client, model: str, api: str, described: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "weather", "input_schema": schema}
    if api == "responses":
        tool = {"type": "function", "name": "weather", "parameters": schema}
    path, body = apis(model)[api]
    body = {**body, "tools": [{**tool, **described}]}
    if (api, model.partition("-")[0], bool(described)) == ("responses", "sglang", False):
        # its template gets a different tool from the one in the request
        assert "untokenized=unsupported" in router.post(path, json=body).headers["x-kvatlas-decision"]
    else:
        check_prediction(router, path, body)
