"""Streams of vLLM's and SGLang's own servers continue at another engine of the same kind."""

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import openai
import pytest

from kvatlas.fleet.records import EngineKind
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store, open_store
from kvatlas_router.ejection.retry_budget import RetryBudget
from tests.end_to_end.processes import ROOT
from tests.frontends.bodies import CALL, CALLS, TOOL
from tests.frontends.clients import SAYS
from tests.frontends.fleet import Fleet, environment_folder
from tests.router.continuation.mortal_engine import Fate, mortal_engines, read_stream
from tests.router.proxy.engines import PATIENT_MS, record, running_fleet, running_proxy
from tests.router.proxy.test_openai_client import openai_client
from tests.router.proxy.test_proxy import status

pytestmark = pytest.mark.anyio

SAY = '[[say The worker  that holds it answers:\n\nümlaut, "quotes" and more.]] Who holds it?'
SAY_PLAINLY = "[[say The worker that holds it answers, and quotes more.]]"
"""Without characters of two tokens: half of one may come in an event with others, and its logprob can't be taken back."""
REASON = "[[slow 0.02]][[say <think>\nA worker may hold it.\n</think>\n\nThe worker that holds it answers.]]"
REASON_AND_CALL = f"[[slow 0.02]][[say <think>\nIt rains.\n</think>\n\n{CALL}]]"
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
USAGE = {"stream_options": {"include_usage": True}}
TWO = {"n": 2, "temperature": 0.5, "seed": 1}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": SAY}], "max_tokens": 99, **USAGE}),
    "logprobs": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": SAY_PLAINLY}], "max_tokens": 99, "logprobs": True},
    ),
    "text": ("/v1/completions", {"prompt": SAY, "max_tokens": 99, **USAGE}),
    "text to its limit": ("/v1/completions", {"prompt": SAY, "max_tokens": 12, **USAGE}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": SAY}], "max_tokens": 99}),
    "message with a stop": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": SAY}], "max_tokens": 99, "stop_sequences": ["quotes"]},
    ),
    "reasoning with tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": REASON}],
            "max_tokens": 99,
            "tools": [{"type": "function", "function": TOOL}],
            "logprobs": True,
            **USAGE,
            **THINKS,
        },
    ),
    "reasoning before a call": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": REASON_AND_CALL}],
            "max_tokens": 99,
            "tools": [{"type": "function", "function": TOOL}],
            **USAGE,
            **THINKS,
        },
    ),
    "response": ("/v1/responses", {"input": SAY, "max_output_tokens": 99, "store": False}),
    "response with reasoning": ("/v1/responses", {"input": REASON, "max_output_tokens": 99, "store": False, **THINKS}),
    "response within reasoning": ("/v1/responses", {"input": REASON, "max_output_tokens": 9, "store": False, **THINKS}),
    "message with thinking": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": REASON}], "max_tokens": 99, **THINKS},
    ),
    "stop": ("/v1/completions", {"prompt": SAY, "max_tokens": 99, "stop": ["quotes"], **USAGE}),
    "reasoning": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": REASON}], "max_tokens": 99, **USAGE, **THINKS},
    ),
    "reasoning to its limit": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": REASON}], "max_tokens": 12, **USAGE, **THINKS},
    ),
    "reasoning with a stop": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": REASON.replace("may", "mäy")}],
            "max_tokens": 99,
            "stop": ["answers"],
            **THINKS,
        },
    ),
    "chat with two choices": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": SAY}], "max_tokens": 24, **USAGE, **TWO},
    ),
    "text with two choices": ("/v1/completions", {"prompt": SAY, "max_tokens": 24, **USAGE, **TWO}),
    "ids to ids": ("/inference/v1/generate", {"sampling_params": {"max_tokens": 99, "temperature": 0}, **USAGE}),
    "generate": ("/generate", {"text": SAY, "sampling_params": {"max_new_tokens": 99, "temperature": 0}}),
    "generate from ids": ("/generate", {"sampling_params": {"max_new_tokens": 99, "temperature": 0}}),
}
VLLM = frozenset({"ids to ids", *(name for name in REQUESTS if "reasoning" in name or "thinking" in name)})
SGLANG = frozenset({"generate", "generate from ids"})
"""APIs that only SGLang has."""


@pytest.fixture
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)


async def test_a_stream_goes_on_at_another_engine(
    fleet: Fleet, model: str, valkey_url: str, no_budget: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvatlas_router.proxy")  # it says why a stream did not continue
    async with (
        _mortal(valkey_url, fleet, model) as fate,
        running_proxy(valkey_url, continue_answers="all", tokenizer_deadline_ms=PATIENT_MS) as client,
    ):
        ids = (await client.post("/tokenize", json={"model": model, "prompt": SAY})).json()["tokens"]
        for name, (path, asked) in REQUESTS.items():
            if name in (VLLM if model.startswith("sglang") else SGLANG):
                continue
            body = {"model": model, "temperature": 0, "stream": True, **asked}
            if name.endswith("ids"):
                body["input_ids" if path == "/generate" else "token_ids"] = ids
            undisturbed = said(await read_stream(client, path, body))
            stays = model.startswith("sglang") and undisturbed.get("call at")  # it gives no token ids of a call
            for after in range(3, stays or undisturbed["events"], 3):
                fate.after, fate.asked = [after], []
                found = said(await read_stream(client, path, body))
                differ = {key: (undisturbed[key], found[key]) for key in found if found[key] != undisturbed[key]}
                free = (
                    {"events", "usages", "ends"} if "stop" in name else {"events", "call at"}
                )  # tokens after a stop may count
                assert not differ.keys() - free, (name, after, json.dumps(differ))
        for name in (
            "openai_chat_stream",
            "anthropic_messages_stream",
            "litellm_chat_stream",
            "langchain_openai_stream",
        ):
            fate.after = [5]
            words = [str(environment_folder("clients") / "bin/python"), "-m", "tests.frontends.clients", name]
            done = await anyio.run_process([*words, str(client.base_url).rstrip("/"), model], cwd=ROOT)
            assert done.stdout.decode().strip() == SAYS and not fate.after, name
        assert (await status(client))["proxy"]["continued"]["resumed"] > 9


CALLED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one call": (CALL, 1, {"max_tokens": 99, **USAGE}),
    "two calls": (CALLS, 7, {"max_tokens": 150, **USAGE}),
    "two calls without usage": (CALLS, 11, {"max_tokens": 150}),
    "a call to its limit": (CALL, 3, {"max_tokens": 24, **USAGE}),
    "a call with its ids": (CALL, 5, {"max_tokens": 99, "extra_body": {"return_token_ids": True}}),
    "calls after reasoning": (
        f"<think>\nIt rains.\n</think>\n\n{CALLS}",
        9,
        {"max_tokens": 150, **USAGE, "extra_body": THINKS},
    ),
}
"""The model's content is the same, at whichever event the engine dies."""
GUIDED = {"max_tokens": 99, "parallel_tool_calls": False}


@pytest.mark.parametrize("model", ["vllm-small"])
@pytest.mark.parametrize("name", CALLED)
async def test_a_tool_call_goes_on_at_another_engine(
    fleet: Fleet, model: str, name: str, valkey_url: str, no_budget: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvatlas_router.proxy")
    says, step, asked = CALLED[name]
    async with (
        _mortal(valkey_url, fleet, model) as fate,
        running_proxy(valkey_url, continue_answers="all", tokenizer_deadline_ms=PATIENT_MS) as proxy,
        openai_client(proxy) as client,
    ):
        ask = partial(_called, client, model, f"[[slow 0.01]][[say {says}]]", asked)
        undisturbed = await ask()
        assert undisturbed["calls"][0]["ids"] == 1 and undisturbed["calls"][0]["name"] == "weather"
        after, deaths, most = 0, 1, 0
        while deaths:
            after += step
            fate.after, fate.asked = [after, 20], []  # the second engine passes the beginning of a call
            assert await ask() == undisturbed, after
            deaths = len(fate.asked) - 1
            most = max(deaths, most)
        assert after > 12 and most == 2
        counted = (await status(proxy))["proxy"]["continued"]
        assert counted["resumed"] > 3 and not any(counted[why] for why in counted if why != "resumed"), counted


@pytest.mark.parametrize("model", ["vllm-small"])
async def test_a_guided_tool_call_ends_with_its_engine(
    fleet: Fleet, model: str, valkey_url: str, no_budget: None
) -> None:
    """The grammar of a single call can't begin in the middle."""
    async with (
        _mortal(valkey_url, fleet, model) as fate,
        running_proxy(valkey_url, continue_answers="all", tokenizer_deadline_ms=PATIENT_MS) as proxy,
        openai_client(proxy) as client,
    ):
        fate.after = [30]
        with pytest.raises(openai.APIError):
            await _called(client, model, f"[[slow 0.01]][[say {CALL}]]", GUIDED)
        assert (await status(proxy))["proxy"]["continued"]["guided"] == 1


async def _called(client: openai.AsyncOpenAI, model: str, says: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The text and the tool calls of a streamed chat, as OpenAI's client reads it."""
    tools: Any = [{"type": "function", "function": TOOL}]
    messages: Any = [{"role": "user", "content": says}]
    stream = await client.chat.completions.create(
        model=model, messages=messages, tools=tools, temperature=0, stream=True, **asked
    )
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for choice in choices for call in choice.delta.tool_calls or ()):
        whole = calls.setdefault(call.index, {"ids": 0, "name": "", "arguments": ""})
        assert call.function is not None
        whole["ids"] += call.id is not None
        whole["name"] += call.function.name or ""
        whole["arguments"] += call.function.arguments or ""
    usages = [chunk.usage.model_dump(exclude={"prompt_tokens_details"}) for chunk in chunks if chunk.usage is not None]
    assert len({(chunk.id, chunk.object, chunk.created, chunk.model) for chunk in chunks}) == 1
    return {
        "calls": calls,
        "text": "".join(choice.delta.content or "" for choice in choices),
        "reasoning": "".join(getattr(choice.delta, "reasoning", None) or "" for choice in choices),
        "ids": [id for choice in choices for id in getattr(choice, "token_ids", None) or ()],
        "roles": [choice.delta.role for choice in choices if choice.delta.role],
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
        "usages": usages,
    }


@asynccontextmanager
async def _store(valkey_url: str) -> AsyncIterator[Store]:
    """An empty store."""
    store = await open_store(valkey_url, wait=False)
    try:
        await store.client.flushall()
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _mortal(valkey_url: str, fleet: Fleet, model: str) -> AsyncIterator[Fate]:
    """Workers with these engines, some of which die mid-answer."""
    engines = [fleet.engines[model][0].url, fleet.engines[model][-1].url]
    kind = EngineKind.SGLANG if model.startswith("sglang") else EngineKind.VLLM
    async with (
        _store(valkey_url) as store,
        mortal_engines({f"w{number}": url for number, url in enumerate([*engines, engines[0]])}) as (urls, fate),
        running_fleet(store, {}),
    ):
        for worker_id, url in urls.items():
            one = record(worker_id, url)
            named = {"kind": kind, "model_id": model, "tokenizer_id": model, "block_size": 16}
            endpoint = one.endpoint.model_copy(update=named)
            await FleetStore(store).write({worker_id: one.model_copy(update={"endpoint": endpoint})})
        yield fate


def said(raw: bytes) -> dict[str, Any]:
    """The content of a stream, however it is cut into events."""
    events = [json.loads(one) for one in re.findall(rb"^data: (\{.*)$", raw, re.M)]
    if b"message_start" in raw:
        return message_of(events)
    if b"response.created" in raw:
        return response_of(events)
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-500:]
    if b'"meta_info"' in raw:
        meta = events[-1]["meta_info"]
        same = {key: meta[key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")}
        assert len({one["meta_info"]["id"] for one in events}) == 1
        return {"text": events[-1]["text"], "ids": events[-1]["output_ids"], "meta": same, "events": len(events) + 1}
    choices = [choice for one in events for choice in one["choices"]]
    choices.sort(key=lambda one: int(one["index"]))  # they continue one after another
    calls = [(at, call) for at, one in enumerate(choices) for call in one.get("delta", {}).get("tool_calls") or ()]
    texts = [one.get("text", one.get("delta", {}).get("content")) or "" for one in choices]
    usages = [one["usage"] for one in events if one.get("usage")]
    named = ("id", "request_id", "object", "created", "model")
    several = len({one["index"] for one in choices})
    heads = {
        (one["choices"][0]["index"], *map(one.get, named))
        for one in events
        if one["choices"] and not (several > 1 and one["choices"][0]["finish_reason"])
    }  # SGLang ends each choice with the id of the one that had the last token
    assert len(heads) == several
    return {
        "text": "".join(texts),
        "reasoning": "".join(
            one.get("delta", {}).get("reasoning") or one.get("delta", {}).get("reasoning_content") or ""
            for one in choices
        ),
        "ids": [id for one in choices for id in one.get("token_ids") or ()],
        "called": "".join(call["function"].get("name") or call["function"]["arguments"] for _, call in calls),
        "call at": calls[0][0] if calls else None,
        "roles": [role for one in choices if (role := one.get("delta", {}).get("role"))],
        "finish": [(one["finish_reason"], one.get("stop_reason")) for one in choices if one["finish_reason"]],
        "usages": [re.sub(r'"\w*cache\w*": \d+(, )?', "", json.dumps(one)) for one in usages],
        "logprobs": [
            token["token"] for one in choices if one.get("logprobs") for token in one["logprobs"].get("content") or ()
        ],
        "events": len(events) + 1,
    }


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message, whose parts may be cut in different places."""
    *_, end = events
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    kinds = [
        kind for one, before in zip(events, [{}, *events], strict=False) if (kind := one["type"]) != before.get("type")
    ]
    ends = [
        ({k: v for k, v in one["delta"].items() if v}, one["usage"]["output_tokens"])
        for one in events
        if one["type"] == "message_delta"
    ]
    return {
        "text": "".join(one.get("text", "") for one in deltas),
        "thinking": "".join(one.get("thinking", "") for one in deltas),
        "kinds": kinds,
        "ends": ends,
        "end": end,
        "events": len(events),
    }


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a response, whose deltas may be cut in different places."""
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    whole = events[-1]["response"]
    assert whole["id"] == events[0]["response"]["id"]
    items = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert items == whole["output"] and len({one["id"] for one in items}) == len(items)
    texts = {
        item["id"]: "".join(one["delta"] for one in events if "delta" in one and one["item_id"] == item["id"])
        for item in items
    }
    assert all(item["content"][0]["text"] == texts[item["id"]] for item in items)
    kinds = [(one["type"], one.get("output_index")) for one in events]
    usage = whole["usage"]
    return {
        "items": [{**{key: item[key] for key in ("type", "status")}, "text": texts[item["id"]]} for item in items],
        "kinds": [one for one, before in zip(kinds, [None, *kinds], strict=False) if one != before],
        "end": (whole["status"], whole["incomplete_details"], usage["output_tokens_details"]["reasoning_tokens"]),
        "usage": [usage[f"{kind}_tokens"] for kind in ("input", "output", "total")],
        "events": len(events),
    }
