"""LiteLLM's deployments and requests, in kvatlas' terms."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas_router.litellm.deployments import (
    add_headers,
    by_engine_model,
    by_worker,
    engine_usage,
    read_request,
    reservation_of,
    stream_timings,
    with_reservation,
)
from kvatlas_router.tokens import Api, Usage
from router_client import Timings
from tests.router_client.pools import pool, worker


def deployment(
    model: str = "hosted_vllm/llama", api_base: str | None = None, id: str = "x", **params: Any
) -> dict[str, Any]:
    return {"litellm_params": {"model": model, "api_base": api_base, **params}, "model_info": {"id": id}}


@pytest.mark.parametrize(
    ("model", "engines"),
    [
        ("hosted_vllm/llama", "llama"),
        ("openai/meta/llama", "meta/llama"),
        ("meta/llama", "meta/llama"),
        ("llama", "llama"),
    ],
)
def test_the_engines_model_is_the_name_behind_the_provider(model: str, engines: str) -> None:
    assert list(by_engine_model([deployment(model)], {"hosted_vllm", "openai"})) == [engines]


def test_a_deployment_belongs_to_the_workers_at_its_address_or_to_the_one_it_names() -> None:
    records = pool(
        worker("i-dp0", base_url="http://10.0.0.1:8000"),
        worker("i-dp1", base_url="http://127.0.0.1:8000", advertised_url="http://10.0.0.1:8000/"),
        worker("named"),
        worker("other", base_url="http://10.0.0.3:8000"),
    )
    at, named, nobodys = deployment(api_base="http://10.0.0.1:8000/v1/"), deployment(id="named"), deployment()
    elsewhere = deployment(api_base="https://api.example.com/v1")
    found = by_worker([at, named, nobodys, elsewhere], records)
    assert found == {"i-dp0": at, "i-dp1": at, "named": named}


def test_a_chosen_deployment_carries_its_reservation_and_leaves_the_list_as_it_was() -> None:
    listed = deployment(extra_headers={"a": "b"})
    chosen = with_reservation(listed, "r1", {"X-Data-Parallel-Rank": "1"})
    assert chosen["litellm_params"]["extra_headers"] == {"a": "b", "X-Data-Parallel-Rank": "1"}
    assert reservation_of({"litellm_params": {"model_info": chosen["model_info"]}}) == chosen["model_info"]
    assert listed == deployment(extra_headers={"a": "b"})
    assert reservation_of({"litellm_params": {"model_info": listed["model_info"]}}) is None
    assert reservation_of({}) is None


def test_the_rank_of_an_earlier_try_does_not_stay() -> None:
    kwargs: dict[str, Any] = {"extra_headers": {"a": "b"}}
    add_headers(kwargs, {"X-Data-Parallel-Rank": "1"})
    assert kwargs["extra_headers"] == {"a": "b", "X-Data-Parallel-Rank": "1"}
    add_headers(kwargs, {})
    assert kwargs["extra_headers"] == {"a": "b"}
    nothing: dict[str, Any] = {}
    add_headers(nothing, {"X-Data-Parallel-Rank": "1"})
    assert nothing == {}


def test_a_request_has_the_fields_that_go_to_the_engine() -> None:
    messages = [{"role": "user", "content": "Who?"}]
    chat = read_request(Api.CHAT, messages, {"max_tokens": 3, "extra_body": {"cache_salt": "s"}})
    assert (chat.messages, chat.output_tokens, chat.cache_salt) == (messages, 3, "s")
    assert read_request(Api.COMPLETIONS, messages, {}).prompt == "Who?"


def test_usage_that_litellm_estimates_is_ignored() -> None:
    answer = SimpleNamespace(usage=SimpleNamespace(model_dump=lambda: {"prompt_tokens": 5, "completion_tokens": 2}))
    asked = {"optional_params": {"stream_options": {"include_usage": True}}}
    assert engine_usage({}, answer) == engine_usage({"stream": True, **asked}, answer) == Usage(5, 2)
    assert engine_usage({"stream": True}, answer) is None
    assert engine_usage({}, SimpleNamespace()) is None


def test_a_streams_first_token_is_timed_from_the_call_to_the_engine() -> None:
    sent = datetime(2026, 1, 1, tzinfo=UTC)
    times = {"api_call_start_time": sent, "completion_start_time": sent + timedelta(milliseconds=30)}
    assert stream_timings({"stream": True, **times}) == Timings(ttft_us=30_000)
    assert stream_timings(times) is None
    assert stream_timings({"stream": True}) is None
