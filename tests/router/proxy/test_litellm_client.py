"""LiteLLM as a client of the proxy."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.store.connection import Store
from tests.eventually import until
from tests.lazy_module import LazyModule
from tests.router.continuation.mortal_engine import mortal_fleet
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.test_openai_client import CHAT, IMAGE, TOOLS, endless, one_engine

if TYPE_CHECKING:
    import litellm
    from litellm.llms.custom_httpx import async_client_cleanup
else:
    litellm = LazyModule("litellm")
    async_client_cleanup = LazyModule("litellm.llms.custom_httpx.async_client_cleanup")

# the warnings are LiteLLM's own
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _without_clients() -> Iterator[None]:
    """LiteLLM keeps its connections for the whole process."""
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()


def at(proxy: httpx.AsyncClient, model: str = MODEL) -> dict[str, Any]:
    return {"model": f"hosted_vllm/{model}", "api_base": f"{proxy.base_url}/v1", "api_key": "key", "num_retries": 0}


async def test_chats_streams_and_completions(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}}), running_proxy(valkey_url) as proxy:
        whole = await litellm.acompletion(**at(proxy), messages=CHAT, max_tokens=3)
        assert whole.usage.completion_tokens == 3
        options = {"stream": True, "stream_options": {"include_usage": True}}
        parts = [part async for part in await litellm.acompletion(**at(proxy), messages=CHAT, max_tokens=4, **options)]
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert parts[-1].usage.completion_tokens == 4
        completion = await litellm.atext_completion(**at(proxy), prompt="Who holds it?", max_tokens=2)
        assert completion.usage.completion_tokens == 2
        await async_client_cleanup.close_litellm_async_clients()


@pytest.mark.parametrize(("provider", "path"), [("hosted_vllm", "/v1"), ("anthropic", "/v1/messages")])
async def test_a_stream_whose_engine_dies_is_one_answer(
    store: Store, valkey_url: str, provider: str, path: str
) -> None:
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as proxy:
        asked = {**at(proxy), "model": f"{provider}/{MODEL}", "api_base": f"{proxy.base_url}{path}"}

        async def ask() -> tuple[str, list[str], int]:
            stream = await litellm.acompletion(
                **asked, messages=CHAT, max_tokens=9, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
            choices = [choice for part in parts for choice in part.choices]
            reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
            text = "".join(choice.delta.content or "" for choice in choices)
            return text, reasons, int(parts[-1].usage.completion_tokens)

        undisturbed = await ask()
        fate.after = [6]
        assert await ask() == undisturbed and undisturbed[1:] == (["length"], 9)
        assert len(fate.asked) == 3
        await async_client_cleanup.close_litellm_async_clients()


async def test_tools_images_embeddings_and_errors(store: Store, valkey_url: str) -> None:
    async with one_engine(store, valkey_url) as (engine, proxy):
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]
        chat = await litellm.acompletion(**at(proxy), messages=messages, tools=TOOLS, n=2)
        assert [choice.message.tool_calls[0].function.name for choice in chat.choices] == ["look_up"] * 2
        assert json.loads(chat.choices[0].message.content) == messages
        embedding = await litellm.aembedding(**at(proxy), input=["a"])
        assert embedding.data[0]["embedding"] == [0.5]
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(**at(proxy, "other"), messages=CHAT)

        async def busy(_: Request) -> Response:
            return JSONResponse({"error": {"message": "full", "type": "x", "code": None}}, 429)

        engine.answer = busy
        with pytest.raises(litellm.RateLimitError):
            await litellm.acompletion(**at(proxy), messages=CHAT)
        await async_client_cleanup.close_litellm_async_clients()


async def test_a_cancelled_stream_ends_at_the_engine(store: Store, valkey_url: str) -> None:
    ended = anyio.Event()
    async with one_engine(store, valkey_url) as (engine, proxy):
        engine.answer = endless(ended, b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}')
        stream = await litellm.acompletion(**at(proxy), messages=CHAT, stream=True)
        await anext(aiter(stream))
        await stream.aclose()
        await until(ended.is_set, what="the engine noticed")
        await async_client_cleanup.close_litellm_async_clients()
