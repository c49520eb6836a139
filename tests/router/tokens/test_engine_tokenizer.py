"""Token ids from engines equal those of the local tokenizer."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens import Api, CannotTokenize, PromptTokens, TextRequest, Why
from kvatlas_router.tokens.engine_tokenizer import ASK_AGAIN_S, EngineTokenizer
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer
from kvatlas_simulator.http.chat_template import render
from tests.eventually import until
from tests.router.apis import TURNS, body_of
from tests.router.proxy.faulty_engine import faulty_engine
from tests.router.proxy.raw_engine import silent_engine
from tests.router.tokens.small_model import save_simulators
from tests.router.upstream.nearby_engines import engine_client
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße\n<|end|>?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Zürich"}}]
BODIES: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 3, "temperature": 0.5},
    {"messages": MESSAGES, "add_generation_prompt": False},
    {"messages": MESSAGES, "reasoning_effort": "high", "documents": [{"title": "Zürich", "text": "a"}]},
    {"messages": MESSAGES, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
    {"messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": "max"}},
]


def of(*urls: str) -> Any:
    async def engines(_: TextRequest) -> Sequence[str]:
        return urls

    return engines


@pytest.mark.parametrize("renders", [True, False])
async def test_an_engine_and_a_local_tokenizer_agree_with_what_the_engine_computes(
    tmp_path: Path, renders: bool
) -> None:
    local = LocalTokenizer.from_folder(save_simulators(tmp_path))
    async with (
        running_engine(num_gpu_blocks=1024, enable_scale_out=renders) as (addresses, client),
        engine_client() as calls,
    ):
        tokenizer = EngineTokenizer(calls, of(addresses.base_url))
        requests = [TextRequest(Api.CHAT, body) for body in BODIES]
        requests.append(TextRequest(Api.COMPLETIONS, {"prompt": "a text", "model": "mock-model"}))
        for request in requests:
            found = await tokenizer.token_ids(request)
            tokens = list(found.ids if isinstance(found, PromptTokens) else found)
            assert tokens == list(local.encode(request))
            if request.body.get("add_generation_prompt", True):
                answer = await client.post(request.api, json={**request.body, "return_token_ids": True})
                assert answer.json()["choices"][0]["prompt_token_ids"] == tokens


@pytest.mark.parametrize("renders", [True, False])
@pytest.mark.parametrize("api", [api for api in Api if api.is_conversation or api is Api.GENERATE])
async def test_every_api_has_the_tokens_of_its_rendering(tmp_path: Path, api: Api, renders: bool) -> None:
    local = LocalTokenizer.from_folder(save_simulators(tmp_path))
    request = TextRequest(api, body_of(api))
    expected = list(render([{"role": role, "content": text} for role, text in TURNS]).encode())
    async with running_engine(enable_scale_out=renders) as (addresses, _), engine_client() as client:
        found = await EngineTokenizer(client, of(addresses.base_url)).token_ids(request)
    assert list(found.ids if isinstance(found, PromptTokens) else found) == list(local.encode(request)) == expected


@pytest.mark.parametrize("status", [403, 404, 500, 200])
async def test_an_engine_that_does_not_render_is_asked_to_only_now_and_then(status: int) -> None:
    asked: list[str] = []
    now = 0.0

    async def answer(request: Request) -> Response:
        asked.append(request.url.path)
        if request.url.path != "/tokenize":
            return JSONResponse({"error": "broken"}, status_code=status)
        return JSONResponse({"tokens": [1]})

    async with faulty_engine(answer) as engine, engine_client() as client:
        tokenizer = EngineTokenizer(client, of(engine.url), clock=lambda: now)
        for _ in range(2):
            request = TextRequest(Api.CHAT, BODIES[0])
            assert [await tokenizer.token_ids(request) for _ in range(3)] == [[1]] * 3
            now += ASK_AGAIN_S
    assert asked == [f"{Api.CHAT}/render", "/tokenize", "/tokenize", "/tokenize"] * 2


async def test_engines_that_do_not_render_are_remembered_one_by_one() -> None:
    asked: list[str] = []

    def engine_that(name: str, status: int, body: dict[str, Any]) -> Any:
        async def answer(request: Request) -> Response:
            asked.append(name + request.url.path)
            if request.url.path == "/tokenize":
                return JSONResponse({"tokens": [1]})
            return JSONResponse(body, status_code=status)

        return faulty_engine(answer)

    refusal = {"error": {"message": "Scale-out endpoints are disabled"}}
    async with (
        engine_that("plain", 403, refusal) as plain,
        engine_that("able", 200, {"token_ids": [2]}) as able,
        engine_client() as client,
    ):
        tokenizer = EngineTokenizer(client, of(plain.url, able.url))
        for _ in range(5):
            await tokenizer.token_ids(TextRequest(Api.CHAT, BODIES[0]))
    render = f"{Api.CHAT}/render"
    assert asked.count(f"plain{render}") == 1 and asked.count(f"able{render}") == 4


async def test_an_older_sglang_needs_a_local_tokenizer() -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"detail": "prompt: Field required"}, status_code=422)

    async with faulty_engine(answer) as engine, engine_client() as client:
        request = TextRequest(Api.CHAT, BODIES[0], EngineKind.SGLANG)
        with pytest.raises(CannotTokenize, match="use a local tokenizer") as error:
            await EngineTokenizer(client, of(engine.url)).token_ids(request)
        assert error.value.why is Why.UNSUPPORTED


async def test_another_engine_is_asked_if_one_is_away() -> None:
    async with running_engine() as (addresses, _), engine_client() as client:
        tokenizer = EngineTokenizer(client, of("http://127.0.0.1:1", addresses.base_url))
        for _ in range(2):
            assert await tokenizer.token_ids(TextRequest(Api.COMPLETIONS, {"prompt": "ab"})) == [97, 98]


async def test_another_engine_is_asked_if_one_hangs_and_that_one_is_asked_last_for_a_while() -> None:
    async with silent_engine(b"") as hanging, running_engine() as (addresses, _), engine_client() as client:
        now = 0.0
        tokenizer = EngineTokenizer(client, of(hanging.url, addresses.base_url), clock=lambda: now)
        request = TextRequest(Api.COMPLETIONS, {"prompt": "ab"})
        for _ in range(6):  # otherwise every second one would go to the hanging engine
            assert await tokenizer.token_ids(request) == [97, 98]
        assert len(hanging.heads) == 1
        now += 10
        for _ in range(2):
            assert await tokenizer.token_ids(request) == [97, 98]
        assert len(hanging.heads) == 2


async def test_an_engine_that_is_only_busy_is_waited_for() -> None:
    """If engines that are busy with a burst were asked twice for each prompt, they would have twice as much to do."""
    may_end = anyio.Event()

    async def answer(asked: Request) -> Response:
        prompt = (await asked.json())["prompt"]
        if prompt == "late":
            await may_end.wait()
        return JSONResponse({"tokens": [len(prompt)]})

    async with faulty_engine(answer) as busy, faulty_engine(answer) as idle, engine_client() as client:
        engines = [busy.url, idle.url]

        async def asked_now(_: TextRequest) -> Sequence[str]:
            return engines

        tokenizer = EngineTokenizer(client, asked_now, patience_s=0.5)
        late = asyncio.ensure_future(tokenizer.token_ids(TextRequest(Api.COMPLETIONS, {"prompt": "late"})))
        await until(lambda: busy.asked, what="the first engine is asked")
        began = time.monotonic()
        engines = [busy.url]
        while time.monotonic() < began + 1.2:  # more than twice its patience
            assert await tokenizer.token_ids(TextRequest(Api.COMPLETIONS, {"prompt": "ab"})) == [2]
        assert not late.done() and not idle.asked
        may_end.set()
        assert await late == [4]


async def test_engines_without_a_tokenizer_are_told_apart_from_those_that_fail() -> None:
    async with running_engine() as (addresses, _), engine_client() as client:
        request = TextRequest(Api.COMPLETIONS, {"prompt": "ab"})
        for urls, why in (
            ([], Why.NO_ENGINE),
            (["http://127.0.0.1:1"], Why.FAILED),
            ([addresses.base_url + "/nothing"], Why.UNSUPPORTED),
        ):
            with pytest.raises(CannotTokenize) as error:
                await EngineTokenizer(client, of(*urls)).token_ids(request)
            assert error.value.why is why
        other = TextRequest(Api.COMPLETIONS, {"prompt": "ab", "model": "other"})
        with pytest.raises(CannotTokenize, match="status 404"):
            await EngineTokenizer(client, of(addresses.base_url)).token_ids(other)


async def test_proxies_from_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with running_engine() as (addresses, _), engine_client() as client:
        tokenizer = EngineTokenizer(client, of(addresses.base_url))
        assert await tokenizer.token_ids(TextRequest(Api.COMPLETIONS, {"prompt": "ab"})) == [97, 98]
