"""Clients of streams whose engine dies get the same as in an undisturbed run."""

import asyncio
import itertools
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.predictions.usage_counts import read_answer_use
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from kvatlas_router.ejection.retry_budget import RetryBudget
from kvatlas_router.proxy import continued_answer
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_router.tokens.engine_tokenizer import EngineTokenizer
from kvatlas_router.tokens.text_request import Api, TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize, Tokens
from kvatlas_router.tokens.tokenizer import Why as WhyNoTokens
from kvatlas_simulator.http.chat_template import render
from tests.eventually import until
from tests.router.continuation.killed_engines import killed_engines
from tests.router.continuation.mortal_engine import Death, mortal_engines, mortal_fleet, read_stream
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import MODEL, PATIENT_MS, SCOPE, Fleet, record, running_proxy
from tests.router.proxy.test_openai_client import openai_client
from tests.router.proxy.test_proxy import requests_are, status
from tests.simulator.answer_faults import AnswerFaults
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who holds the prefix?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 9, **_USAGE}),
    "chat without usage": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 7}),
    "text": (COMPLETIONS, {"prompt": "Who holds the prefix?", "max_tokens": 8, **_USAGE}),
    "text, with the default limit": (COMPLETIONS, {"prompt": "Who?"}),
    "token ids": (COMPLETIONS, {"prompt": list(b"Who holds it?"), "max_tokens": 7, **_USAGE}),
    "token ids, shown": (COMPLETIONS, {"prompt": list(b"Who?"), "max_tokens": 6, "return_token_ids": True, **_USAGE}),
    "message": (
        "/v1/messages",
        {"system": "Be brief.", "messages": [{"role": "user", "content": "Who holds it?"}], "max_tokens": 8},
    ),
    "response": ("/v1/responses", {"input": "Who holds it?", "instructions": "Be brief.", "max_output_tokens": 7}),
    "chat whose prompt opens the reasoning": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 7, "chat_template_kwargs": {"thinking": True}, **_USAGE},
    ),
    "the same with a stop string": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 9, "stop": "zzz", "chat_template_kwargs": {"thinking": True}, **_USAGE},
    ),
    "chat with tools": (CHAT, {"messages": MESSAGES, "max_tokens": 7, "tools": [TOOL], **_USAGE}),
    "chat with its ids shown": (CHAT, {"messages": MESSAGES, "max_tokens": 6, "return_token_ids": True, **_USAGE}),
    "generate": ("/generate", {"text": "Who holds it?", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}),
    "generate from ids": (
        "/generate",
        {"input_ids": list(b"Who?"), "sampling_params": {"temperature": 0, "max_new_tokens": 5}},
    ),
    "ids to ids": (
        "/inference/v1/generate",
        {"token_ids": list(b"Who?"), "sampling_params": {"temperature": 0, "max_tokens": 6}, **_USAGE},
    ),
    "ids to ids, without usage": (
        "/inference/v1/generate",
        {"token_ids": list(b"Who holds it?"), "sampling_params": {"temperature": 0, "max_tokens": 5}},
    ),
    "usage in each event": (
        COMPLETIONS,
        {
            "prompt": "Who?",
            "max_tokens": 6,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
}
FIRST = {CHAT: 2, "/v1/messages": 3, "/v1/responses": 5}
"""Number of events up to the first content. Before that, the router tries again anyway."""
_SALTS = itertools.count()


@pytest.fixture
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry budget that these tests don't use up, since all of their requests lose an engine."""
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], **fields: Any) -> bytes:
    """The stream of a request that finds nothing in a cache, without the values that differ in each answer."""
    salt = f"salt {next(_SALTS)}"
    whole = {"model": MODEL, "temperature": 0, "stream": True, "cache_salt": salt, **body, **fields}
    raw = await read_stream(client, path, whole)
    return re.sub(rb'"(id|item_id|request_id|created|created_at)":("[\w-]+"|\d+)', _once(raw), raw)


def _once(raw: bytes) -> Any:
    """The one id or time that all events of a stream have."""
    ids = set(re.findall(rb'"(?:request_|item_)?id":"(?:msg-|resp-)?([\w-]+)"', raw))
    assert len(ids) <= 1 and len(set(re.findall(rb'"created(?:_at)?":(\d+)', raw))) <= 1
    return rb'"\1":0'


async def not_continued(client: httpx.AsyncClient) -> dict[str, int]:
    """Number of streams that could not be continued, by reason."""
    counted = (await status(client))["proxy"]["continued"]
    return {why: number for why, number in counted.items() if number and why != "resumed"}


def events(raw: bytes) -> int:
    return raw.count(b"\n\n")


async def test_a_stream_goes_on_after_each_of_its_events(store: Store, valkey_url: str, no_budget: None) -> None:
    async with mortal_fleet(store) as (fleet, fate), running_proxy(valkey_url, continue_answers="all") as client:
        died = 0
        for name, (path, body) in REQUESTS.items():
            undisturbed = await ask(client, path, body)
            assert undisturbed.endswith((b"data: [DONE]\n\n", b'"message_stop"}\n\n', b'"response.incomplete"}\n\n'))
            assert undisturbed == await ask(fleet.clients["w0"], path, body), "as the engine itself answers"
            for after in range(FIRST.get(path, 1), events(undisturbed)):
                fate.death = (Death.KILLED, Death.RESET, Death.ENDED)[after % 3]
                fate.after, fate.asked = [after], []
                found = await ask(client, path, body)
                assert found == undisturbed, (name, after, await not_continued(client), fate.asked)
                died += 1
                assert len({worker_id for worker_id, _ in fate.asked}) == len(fate.asked)
        proxy = (await status(client))["proxy"]
        assert (proxy["broken"], proxy["gave_up"]) == (0, 0) and died > 40


async def test_stop_strings_end_an_answer_across_its_seam(store: Store, valkey_url: str, no_budget: None) -> None:
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        for path, body in ((COMPLETIONS, {"prompt": "Who?"}), (CHAT, {"messages": MESSAGES})):
            text = text_of(await ask(client, path, body, max_tokens=16))
            for stop in ([text[8:12], "never"], "never", [text[10:12]]):  # "never": the answer ends at its limit
                undisturbed = await ask(client, path, body, max_tokens=14, stop=stop, **_USAGE)
                assert (b'"finish_reason":"stop"' in undisturbed) == (stop != "never")
                for after in range(3, events(undisturbed), 3):
                    fate.after = [after]
                    found = await ask(client, path, body, max_tokens=14, stop=stop, **_USAGE)
                    assert found == undisturbed, (path, stop, after, await not_continued(client))


async def test_a_stream_goes_on_after_several_deaths(store: Store, valkey_url: str, no_budget: None) -> None:
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 20, **_USAGE}
    async with mortal_fleet(store, 4) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        undisturbed = await ask(client, path, body)
        for after in ([5, 4], [3, 6, 9], [21, 3], [10, 8, 4]):
            fate.after, fate.asked = list(after), []
            assert await ask(client, path, body) == undisturbed, (after, await not_continued(client))
            assert len({worker_id for worker_id, _ in fate.asked}) == len(fate.asked) > 1


async def test_the_official_client_sees_one_answer(store: Store, valkey_url: str) -> None:
    messages: Any = MESSAGES
    async with (
        mortal_fleet(store) as (_, fate),
        running_proxy(valkey_url, continue_answers="deterministic") as proxy,
        openai_client(proxy) as client,
    ):

        async def chat() -> tuple[str, set[str], list[str], list[int]]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                seed=7,
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            choices = [choice for chunk in chunks for choice in chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
            usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
            return text, {chunk.id for chunk in chunks}, list(reasons), usages

        text, *_ = await chat()
        fate.after = [7]
        found = await chat()
        assert len(fate.asked) == 3 and len(found[1]) == 1
        assert (found[0], *found[2:]) == (text, ["length"], [12])


EVERY_EVENT: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 4, **_USAGE}),
    "text": (COMPLETIONS, {"prompt": "Who holds the prefix?", "max_tokens": 3}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "Who holds it?"}], "max_tokens": 3}),
    "response": ("/v1/responses", {"input": "Who holds it?", "max_output_tokens": 3}),
    "generate": ("/generate", {"text": "Who holds it?", "sampling_params": {"temperature": 0, "max_new_tokens": 3}}),
}


async def test_a_stream_goes_on_after_a_kill_or_a_stall_at_each_of_its_events(
    store: Store, valkey_url: str, no_budget: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once. Each stream has its own pool of two workers, the first of which is killed (SIGKILL) or stalls."""
    shorten_bounds(monkeypatch, unknown_s=10.0)
    names = [f"m{number}" for number in range(64)]
    serves: dict[str, Any] = {"adapters": names}  # each of which is a pool
    async with mortal_fleet(store, 2, **serves) as (fleet, _), AsyncExitStack() as stack:
        asked, kills = dict[str, tuple[str, dict[str, Any], bytes]](), dict[str, int]()
        for path, body in EVERY_EVENT.values():
            length = events(await ask(fleet.clients["w0"], path, body))
            for after in range(FIRST.get(path, 1), length):
                for stalls in (True, False):
                    if stalls or path == CHAT:
                        name = names[len(asked)]
                        undisturbed = await ask(fleet.clients["w0"], path, body, model=name, cache_salt=None)
                        asked[name] = path, body, undisturbed
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
            path, body, undisturbed = asked[name]
            found = await ask(client, path, body, model=name, cache_salt=None)
            found, undisturbed = (re.sub(rb'"cached_tokens":\d+', b"", one) for one in (found, undisturbed))
            assert found == undisturbed, (name, path, kills.get(name), await not_continued(client))

        async with anyio.create_task_group() as tasks:
            for name in asked:
                tasks.start_soon(compare, name)
        assert (await status(client))["proxy"]["continued"]["resumed"] == len(asked) - 5 > 14  # five lack only the end


async def report_in_pool(fleet: Fleet, name: str, which: str, url: str) -> None:
    """Write the record of a worker in a pool with one model. The `first` one holds the prompts of these tests."""
    worker_id = f"{name}-{which}"
    written = record(worker_id, url)
    endpoint = written.endpoint.model_copy(update={"model_id": name})
    await FleetStore(fleet.store).write({worker_id: written.model_copy(update={"endpoint": endpoint})})
    if which == "first":
        for path, body in EVERY_EVENT.values():
            await fleet.holds(worker_id, prompt_of(Api(path), body), Scope(name, MODEL))


def prompt_of(api: Api, body: Mapping[str, Any]) -> list[int]:
    """The prompt's tokens in the simulator."""
    messages = as_chat(TextRequest.of(api, body)).body.get("messages", ())
    return list((render(messages) if api.is_conversation else str(TextRequest.of(api, body).prompt)).encode())


async def test_a_stream_goes_on_after_its_engines_error(store: Store, valkey_url: str, no_budget: None) -> None:
    """An engine whose core has died reports that in the stream."""
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 8, "cache_salt": None}
    async with (
        mortal_fleet(store, 1) as (fleet, _),
        running_engine(AnswerFaults("late_error", 5), answers_text=True) as (failing, _),
    ):
        await fleet.report("w1", failing.base_url)
        await fleet.holds("w1", list(render(MESSAGES).encode()))
        async with running_proxy(valkey_url, continue_answers="all") as client:
            found = await ask(client, path, body)
            assert (await status(client))["proxy"]["continued"]["resumed"] == 1
            await fleet.report("w1", fleet.urls["w0"])
            assert found == await ask(client, path, body)


async def test_a_stream_stays_at_a_stalled_engine_without_a_successor(
    store: Store, valkey_url: str, no_budget: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only other worker dies as soon as it is asked; the stalled one gets another chance, and takes it."""
    shorten_bounds(monkeypatch)
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 8, **_USAGE}
    async with mortal_fleet(store, 2) as (fleet, fate), running_proxy(valkey_url, continue_answers="all") as client:
        undisturbed = await ask(client, path, body)
        fate.death, fate.after, fate.asked = Death.STALLED, [4], []
        await fleet.report("w1", await refusing_address())
        await fleet.holds("w0", prompt_of(Api.CHAT, body))
        async with anyio.create_task_group() as tasks:

            async def revive() -> None:
                async def refused() -> bool:
                    return bool((await status(client))["proxy"]["unreachable"])

                await until(refused, what="the other worker was tried")
                fate.revive()

            tasks.start_soon(revive)
            assert await ask(client, path, body, cache_salt=None) == undisturbed
        proxy = (await status(client))["proxy"]
        assert (proxy["broken"], proxy["continued"]["resumed"]) == (0, 0)


async def test_what_is_counted_is_the_clients_request(store: Store, valkey_url: str, no_budget: None) -> None:
    """The end of an answer after a reset counts too; the first engine's part does not count again in the second one's
    prompt."""
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 9}
    prompt_tokens = len(prompt_of(Api.CHAT, body))
    async with mortal_fleet(store) as (fleet, fate):
        for client in fleet.clients.values():
            undisturbed = await ask(client, path, body, cache_salt=None)  # now each has the prompt and the answer
        async with running_proxy(valkey_url, continue_answers="all") as client:
            fate.death = Death.RESET
            for after in (4, 7, events(undisturbed) - 1):  # then only the end is missing
                fate.after = [after]
                assert await ask(client, path, body, cache_salt=None) == undisturbed
            proxy = (await status(client))["proxy"]
            assert (proxy["answered"], proxy["gone"], proxy["continued"]["resumed"]) == (3, 0, 2)
        (use,) = (await read_answer_use(store, SCOPE.pool_id)).values()
        assert (use.answers, use.prompt_tokens) == (3, 3 * prompt_tokens)
        assert use.cached_tokens <= 3 * prompt_tokens


async def refusing_address() -> str:
    """An address on which no server listens."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    server.close()
    await server.wait_closed()
    return f"http://{host}:{port}"


async def test_two_engines_that_die_at_the_same_token_are_enough(
    store: Store, valkey_url: str, no_budget: None
) -> None:
    """The request itself may be killing them."""
    path, body = CHAT, {"messages": MESSAGES, "max_tokens": 8}
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        fate.after = [4, 0, 0]
        found = await ask(client, path, body)
        assert found.count(b'"content"') == 4 and b'data: {"error": ' in found and len(fate.asked) == 2
        assert await not_continued(client) == {"same_token": 1}


THINKS = {"messages": MESSAGES, "max_tokens": 9, "stop": "zzz", "chat_template_kwargs": {"thinking": True}, **_USAGE}
"""A chat whose template does not fit a partial answer, so its tokens are needed."""


@pytest.mark.parametrize("waits", [True, False])
async def test_an_answer_waits_for_its_tokens(
    store: Store, valkey_url: str, no_budget: None, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The tokens come late, even those of the prompt, either in time or too late."""
    monkeypatch.setattr(continued_answer, "TOKENS_WAIT_S", 60.0 if waits else 0.2)
    read, late = EngineTokenizer.token_ids, [6 if waits else 1_000_000]

    async def token_ids(tokenizer: EngineTokenizer, request: TextRequest) -> Tokens:
        late[0] -= 1
        if late[0] >= 0:
            raise CannotTokenize(WhyNoTokens.LATE, "too late")
        return await read(tokenizer, request)

    async with mortal_fleet(store) as (fleet, fate), running_proxy(valkey_url, continue_answers="all") as client:
        monkeypatch.setattr(EngineTokenizer, "token_ids", token_ids)
        fate.after = [6]
        found = await ask(client, CHAT, THINKS)
        assert late[0] < 0 or not waits
        if waits:
            assert found == await ask(fleet.clients["w0"], CHAT, THINKS)
        else:
            assert b'data: {"error": ' in found and await not_continued(client) == {"tokens": 1}


async def test_a_client_leaves_during_the_rest(store: Store, valkey_url: str, no_budget: None) -> None:
    """Nothing is left of it, neither a booking nor a request at an engine, and it counts once."""
    path, body = CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 2_000, "temperature": 0, "stream": True}
    slow = {"speed_up": 1, "decode_step_us": 20_000}
    async with (
        mortal_fleet(store, **slow) as (fleet, fate),
        running_proxy(valkey_url, continue_answers="all") as client,
    ):
        fate.after = [6]
        async with client.stream("POST", path, json=body) as answer:
            said = 0
            async for line in answer.aiter_lines():
                said += line.startswith("data: ")
                if said == 12:
                    break
        _, _, reservations, *_ = pool_keys(SCOPE.pool_id)

        async def is_free() -> bool:
            return not await store.client.hlen(reservations) and (await status(client))["in_flight"] == 0

        await until(is_free, what="its bookings are gone")
        for engine in fleet.clients.values():
            await until(partial(requests_are, engine, "running", 0), what="no engine computes for it")
        proxy = (await status(client))["proxy"]
        assert (proxy["answered"], proxy["gone"], proxy["broken"], proxy["continued"]["resumed"]) == (1, 1, 0, 1)


def text_of(raw: bytes) -> str:
    """The stream's text."""
    choices = [
        json.loads(line.removeprefix(b"data: "))["choices"]
        for line in raw.split(b"\n\n")
        if line.startswith(b"data: {")
    ]
    return "".join(one.get("text", one.get("delta", {}).get("content") or "") for each in choices for one in each)
