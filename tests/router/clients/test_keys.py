"""Clients with keys and limits: the official client, and those of Anthropic's API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.store.connection import Store
from kvatlas_router.tenancy.proof import hash_of
from tests.eventually import until
from tests.http_client import http_client
from tests.lazy_module import LazyModule
from tests.router.proxy.engines import MODEL, Fleet, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import FaultyEngine, faulty_engine

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

pytestmark = pytest.mark.anyio

LIMITS = {
    "plain": "",
    "single": "requests_in_flight = 1",
    "small": "tokens_per_minute = 1000",
    "short": "body_bytes = 10",
}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
CHAT: Any = MESSAGE["messages"]


async def answer_well(_: Request) -> Response:
    message = {"role": "assistant", "content": "Hello"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return JSONResponse({"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices})


@asynccontextmanager
async def guarded(
    store: Store, valkey_url: str, folder: Path
) -> AsyncIterator[tuple[Fleet, FaultyEngine, httpx.AsyncClient]]:
    """A router with a key for each of `LIMITS`."""
    file = folder / "clients.toml"
    texts = (
        f'[clients.{name}]\nkeys = ["{hash_of(name.encode())}"]\ntenants = ["{name}"]\n{limit}\n'
        for name, limit in LIMITS.items()
    )
    file.write_text("".join(texts))
    async with running_fleet(store, {}) as fleet, faulty_engine(answer_well) as engine:
        await fleet.report("w1", engine.url)
        given = {"clients_file": file, "control_port": 0, "tokenizer": "none"}
        async with running_proxy(valkey_url, **given) as client:
            yield fleet, engine, client


@asynccontextmanager
async def official(proxy: httpx.AsyncClient, key: str) -> AsyncIterator[tuple["openai.AsyncOpenAI", list[int]]]:
    """OpenAI's client with its defaults, so it retries requests by itself. The list has the statuses of all answers."""
    statuses: list[int] = []

    async def note(answer: httpx.Response) -> None:
        statuses.append(answer.status_code)

    async with http_client(event_hooks={"response": [note]}) as http:
        yield openai.AsyncOpenAI(base_url=f"{proxy.base_url}/v1", api_key=key, http_client=http), statuses


async def test_errors_of_the_messages_api_have_anthropics_form(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """Its clients read the error's type."""
    async with guarded(store, valkey_url, tmp_path) as (fleet, _, client):

        async def error(path: str = "", *, key: str = "plain", method: str = "POST", **more: Any) -> tuple[int, str]:
            given = {"json": MESSAGE, **more}
            headers = {"x-api-key": key, **given.pop("headers", {})}
            answer = await client.request(method, f"/v1/messages{path}", headers=headers, **given)
            said = answer.json()
            assert said.keys() == {"type", "error"} and said["type"] == "error", said
            assert said["error"].keys() == {"type", "message"} and said["error"]["message"]
            return answer.status_code, said["error"]["type"]

        long = {**MESSAGE, "messages": [{"role": "user", "content": "x" * 10_000}]}
        for path in ("", "/count_tokens"):
            assert (await client.post(f"/v1/messages{path}", headers={"x-api-key": "plain"}, json=MESSAGE)).is_success
            assert await error(path, key="wrong") == (401, "authentication_error")
            assert await error(path, headers={"x-kvatlas-tenant": "small"}) == (403, "permission_error")
            assert await error(path, json={**MESSAGE, "model": "other"}) == (404, "not_found_error")
            assert await error(path, json=["no object"]) == (400, "invalid_request_error")
            assert await error(path, method="PUT") == (405, "invalid_request_error")
            assert await error(path, key="short") == (413, "request_too_large")
            assert await error(path, key="small", json=long) == (429, "rate_limit_error")
        assert await error("/batches") == (404, "not_found_error")
        assert await error("//count_tokens") == (404, "not_found_error")
        await fleet.report("w1", "http://127.0.0.1:1")

        async def is_gone() -> bool:
            return not (await client.post("/v1/messages", headers={"x-api-key": "plain"}, json=MESSAGE)).is_success

        await until(is_gone, what="no engine answers")
        assert await error() == (503, "overloaded_error")


async def test_the_official_client_waits_for_a_limit_but_not_for_one_that_it_can_never_meet(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with guarded(store, valkey_url, tmp_path) as (_, engine, proxy):
        go_on = anyio.Event()

        async def wait(request: Request) -> Response:
            await go_on.wait()
            return await answer_well(request)

        engine.answer = wait
        async with official(proxy, "single") as (client, statuses), anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(partial(client.chat.completions.create, model=MODEL, messages=CHAT))
            await until(lambda: 429 in statuses, what="the second request is refused")
            go_on.set()
        assert sorted(statuses) == [200, 200, 429]
        async with official(proxy, "small") as (client, statuses):
            for streamed in (False, True):
                with pytest.raises(openai.RateLimitError):
                    await client.completions.create(model=MODEL, prompt="x" * 10_000, stream=streamed)
        assert statuses == [429, 429]
