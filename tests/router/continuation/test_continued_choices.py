"""When the engine of a stream with several choices dies, other engines continue each choice that has not ended, one after
another."""

import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import httpx
import pytest

from kvatlas.predictions.usage_counts import read_answer_use
from kvatlas.store.connection import Store
from tests.router.continuation.killed_engines import killed_engines
from tests.router.continuation.mortal_engine import Death, mortal_engines, mortal_fleet
from tests.router.continuation.test_continued_streams import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TOOL,
    ask,
    events,
    no_budget,
    not_continued,
    report_in_pool,
)
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import PATIENT_MS, SCOPE, running_proxy
from tests.router.proxy.test_openai_client import openai_client
from tests.router.proxy.test_proxy import status

__all__ = ["no_budget"]
pytestmark = pytest.mark.anyio

_USAGE = {"stream_options": {"include_usage": True}}
SEEDED = {"temperature": 0.7, "seed": 5}
"""Each choice has its own seed, so each continues with its own text."""
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 3, "n": 3, **_USAGE}),
    "chat without usage": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 2}),
    "chat with tools": (CHAT, {"messages": MESSAGES, "max_tokens": 3, "n": 2, "tools": [TOOL], **_USAGE}),
    "chat with its ids shown": (CHAT, {"messages": MESSAGES, "max_tokens": 3, "n": 2, "return_token_ids": True}),
    "text": (COMPLETIONS, {"prompt": "Who holds the prefix?", "max_tokens": 4, "n": 3, **_USAGE}),
    "token ids": (COMPLETIONS, {"prompt": list(b"Who?"), "max_tokens": 3, "n": 2, **_USAGE}),
    "usage in each event": (
        COMPLETIONS,
        {
            "prompt": "Who?",
            "max_tokens": 3,
            "n": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
}


def by_choice(raw: bytes) -> dict[int | None, list[Any]]:
    """A stream's events by their choice; events without one, and the one with the usage, come last."""
    found: dict[int | None, list[Any]] = {}
    for data in re.findall("^data: (.*)$", raw.decode(), re.M):
        event = json.loads(data) if data.startswith("{") else data
        choices = event.get("choices") if isinstance(event, dict) else None
        assert not (choices and None in found), "nothing follows the usage"
        found.setdefault(choices[0]["index"] if choices else None, []).append(event)
    return found


async def test_each_choice_goes_on_after_each_event(store: Store, valkey_url: str, no_budget: None) -> None:
    async with mortal_fleet(store) as (fleet, fate), running_proxy(valkey_url, continue_answers="all") as client:
        died = 0
        for name, (path, body) in REQUESTS.items():
            asked = {**SEEDED, **body}
            undisturbed = by_choice(await ask(client, path, asked))
            assert undisturbed == by_choice(await ask(fleet.clients["w0"], path, asked)), "as the engine itself answers"
            texts = {re.sub('"index": .', "", json.dumps(one)) for one in undisturbed.values()}
            assert len(texts) == len(undisturbed) == body["n"] + 1 and undisturbed[None][-1] == "[DONE]"
            length = sum(map(len, undisturbed.values()))
            for after in range(2, length):
                fate.death = (Death.KILLED, Death.RESET, Death.ENDED)[after % 3]
                fate.after, fate.asked = [after], []
                found = by_choice(await ask(client, path, asked))
                assert found == undisturbed, (name, after, await not_continued(client), fate.asked)
                assert len(fate.asked) <= 1 + body["n"]
                died += 1
        proxy = (await status(client))["proxy"]
        assert (proxy["broken"], proxy["gave_up"]) == (0, 0) and proxy["continued"]["resumed"] > died > 40


async def test_choices_go_on_after_several_deaths(store: Store, valkey_url: str, no_budget: None) -> None:
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 6, "n": 2, **SEEDED, **_USAGE}
    async with mortal_fleet(store, 4) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        undisturbed = by_choice(await ask(client, path, body))
        for after in ([5, 4], [3, 20, 4], [7, 3, 2]):
            fate.after, fate.asked = list(after), []
            assert by_choice(await ask(client, path, body)) == undisturbed, (after, await not_continued(client))
            assert not fate.after


async def test_choices_go_on_after_a_kill_or_a_stall_at_each_of_their_events(
    store: Store, valkey_url: str, no_budget: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once. Each stream has its own pool of two workers, the first of which is killed (SIGKILL) or stalls."""
    shorten_bounds(monkeypatch, unknown_s=10.0)
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 2, "n": 2, **SEEDED, **_USAGE}
    names = [f"m{number}" for number in range(16)]
    serves: dict[str, Any] = {"adapters": names}  # each of which is a pool
    async with mortal_fleet(store, 2, **serves) as (fleet, _), AsyncExitStack() as stack:
        undisturbed, kills = dict[str, Any](), dict[str, int]()
        for after in range(2, events(await ask(fleet.clients["w0"], path, body))):
            for stalls in (True, False):
                name = names[len(undisturbed)]
                undisturbed[name] = by_choice(await ask(fleet.clients["w0"], path, body, model=name, cache_salt=None))
                if stalls:
                    urls, fate = await stack.enter_async_context(mortal_engines({name: fleet.urls["w1"]}))
                    fate.death, fate.after = Death.STALLED, [after]
                    await report_in_pool(fleet, name, "first", urls[name])
                else:
                    kills[name] = after
                await report_in_pool(fleet, name, "other", fleet.urls["w0"])
        settings = {"answers_text": True, "enable_scale_out": True, **serves}
        killed = await stack.enter_async_context(killed_engines(kills, **settings))
        for name, url in killed.items():
            await report_in_pool(fleet, name, "first", url)
        client = await stack.enter_async_context(
            running_proxy(valkey_url, continue_answers="all", tokenizer_deadline_ms=PATIENT_MS)
        )

        async def compare(name: str) -> None:
            found = by_choice(await ask(client, path, body, model=name, cache_salt=None))
            assert without_cache(found) == without_cache(undisturbed[name]), (name, await not_continued(client))

        async with anyio.create_task_group() as tasks:
            for name in undisturbed:
                tasks.start_soon(compare, name)
        assert (await status(client))["proxy"]["continued"]["resumed"] > len(undisturbed) > 10


def without_cache(found: object) -> str:
    return re.sub(r'"cached_tokens": \d+', "", json.dumps(found))


async def test_an_answer_of_several_choices_counts_once(store: Store, valkey_url: str, no_budget: None) -> None:
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 3, "cache_salt": None, **SEEDED}
    async with mortal_fleet(store) as (_, fate):
        async with running_proxy(valkey_url, continue_answers="all") as client:
            undisturbed = by_choice(await ask(client, path, body))
            fate.death, fate.after = Death.RESET, [6]
            found = by_choice(await ask(client, path, body))
            assert without_cache(found) == without_cache(undisturbed)
            proxy = (await status(client))["proxy"]
            assert (proxy["answered"], proxy["gone"], proxy["continued"]["resumed"]) == (2, 0, 3)
        (use,) = (await read_answer_use(store, SCOPE.pool_id)).values()
        assert use.answers == 2


async def test_the_official_client_sees_all_choices(store: Store, valkey_url: str) -> None:
    messages: Any = MESSAGES
    async with (
        mortal_fleet(store) as (_, fate),
        running_proxy(valkey_url, continue_answers="deterministic") as proxy,
        openai_client(proxy) as client,
    ):

        async def chat() -> list[tuple[str, str | None]]:
            stream = await client.chat.completions.create(
                model="mock-model", messages=messages, n=2, seed=7, max_tokens=5, stream=True
            )
            texts, ends = ["", ""], dict[int, str | None]()
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    ends[choice.index] = choice.finish_reason
            return [(texts[index], ends[index]) for index in (0, 1)]

        undisturbed = await chat()
        fate.after = [6]
        assert await chat() == undisturbed and len({text for text, _ in undisturbed}) == 2 and not fate.after


async def test_too_many_choices_and_those_of_other_calls_do_not_go_on(
    store: Store, valkey_url: str, no_budget: None
) -> None:
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        for path, body in (
            (CHAT, {"messages": MESSAGES, "max_tokens": 2, "n": 9}),
            ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "n": 2}}),
        ):
            fate.after = [4]
            assert b"[DONE]" not in await read(client, path, body)
        assert await not_continued(client) == {"choices": 2}


async def read(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> bytes:
    """The bytes of a stream that ends in an error, or whose connection is cut."""
    text = b""
    async with client.stream("POST", path, json={"model": "mock-model", "stream": True, **SEEDED, **body}) as answer:
        with suppress(httpx.RemoteProtocolError):
            async for part in answer.aiter_raw():
                text += part
    return text
