"""LiteLLM's proxy server with its deployments chosen by kvatlas: its steps in the order in which it makes them, and (if an
environment with it is named) itself, as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store
from tests.eventually import until
from tests.http_client import http_client
from tests.lazy_module import LazyModule
from tests.router.proxy.engines import MODEL, SCOPE, running_fleet
from tests.router.proxy.raw_engine import raw_engine
from tests.router.tokens.small_model import save_simulators

if TYPE_CHECKING:
    import litellm
    from litellm.llms.custom_httpx import async_client_cleanup

    from kvatlas_router.litellm import proxy_server
else:
    litellm = LazyModule("litellm")
    async_client_cleanup = LazyModule("litellm.llms.custom_httpx.async_client_cleanup")
    proxy_server = LazyModule("kvatlas_router.litellm.proxy_server")

PYTHON = os.environ.get("KVATLAS_LITELLM_PROXY", "")
# the warnings are LiteLLM's own
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PROMPT = "The cache holds blocks of tokens; a router asks which worker holds the most of them. " * 2
BOOKINGS = f"kva:{{pool:{SCOPE.pool_id}}}:booked.2"
START_S = 200
"""Importing LiteLLM's proxy takes half a minute on a busy machine."""


ASKED: Mapping[str, Mapping[str, Any]] = {
    "acompletion": {"messages": [{"role": "user", "content": "Hello"}]},
    "atext_completion": {"prompt": "Hello"},
}
MESSAGES = [{"role": "user", "content": PROMPT}]
FAILS = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"


class ProxyRouter:
    """A Router as the proxy server uses it: each request is logged, announced to the callbacks, and then sent."""

    def __init__(self, store: Store, routing: "proxy_server.ProxyServerRouting", router: "litellm.Router") -> None:
        self._store = store
        self.routing = routing
        self._router = router

    async def ask(self, call: str, **changed: Any) -> tuple[dict[str, Any], Any]:
        """The request as the proxy's hooks get it afterwards, and its answer, or the error."""
        data = {
            "model": "chat",
            "max_tokens": 3,
            "metadata": {},
            "litellm_call_id": str(uuid4()),
            **ASKED[call],
            **changed,
        }
        log, data = litellm.utils.function_setup(call, litellm.utils.Rules(), datetime.now(), **data)  # noqa: DTZ005 - as LiteLLM does
        data["litellm_logging_obj"] = log
        await self.routing.async_pre_call_hook(None, None, data, call)
        try:
            return data, await getattr(self._router, call)(**data)
        except litellm.InternalServerError as error:
            return data, error

    async def all_have_ended(self, booked: int) -> None:
        """This many were booked, and all of them ended, here and in the store."""
        strategy = self.routing.strategy
        assert strategy is not None

        async def none_left() -> bool:
            return not strategy.held and not await self._store.client.zcard(BOOKINGS)

        await until(none_left, what="every booking has ended", deadline_s=20)
        counters = strategy.counters
        assert (counters.held, counters.held_done, counters.held_expired) == (booked, booked, 0)


@asynccontextmanager
async def proxy_router(
    store: Store, redis_url: str, urls: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ProxyRouter]:
    router = litellm.Router(
        model_list=[
            {
                "model_name": "chat",
                "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
            }
            for url in urls.values()
        ],
        num_retries=2,
        disable_cooldowns=True,
    )
    monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", SimpleNamespace(llm_router=router))
    monkeypatch.setenv("KVATLAS_REDIS_URL", redis_url)
    monkeypatch.setenv("KVATLAS_TOKENIZER", "none")
    routing = proxy_server.ProxyServerRouting()
    try:
        yield ProxyRouter(store, routing, router)
    finally:
        await anyio.to_thread.run_sync(routing.close)
        await async_client_cleanup.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.mark.parametrize("call", ASKED)
async def test_every_booking_of_the_proxy_s_requests_ends(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with (
        running_fleet(store, {"w1": {}}) as fleet,
        proxy_router(store, valkey_url, fleet.urls, monkeypatch) as proxy,
    ):
        await proxy.ask(call)  # this one began before kvatlas was there
        await proxy.all_have_ended(1)
        data, stream = await proxy.ask(call, stream=True)
        passed = proxy.routing.async_post_call_streaming_iterator_hook(None, stream, data)
        assert [part async for part in passed]
        await proxy.all_have_ended(2)


@pytest.mark.parametrize("call", ASKED)
async def test_a_client_that_leaves_its_stream_ends_the_booking(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with (
        running_fleet(store, {"w1": {}}) as fleet,
        proxy_router(store, valkey_url, fleet.urls, monkeypatch) as proxy,
    ):
        data, stream = await proxy.ask(call, stream=True)
        async with aclosing(proxy.routing.async_post_call_streaming_iterator_hook(None, stream, data)) as passed:
            await anext(passed)
            await stream.aclose()  # the proxy does, and leaves what is around it to be collected as garbage
            await proxy.all_have_ended(1)
        data, stream = await proxy.ask(call, stream=True)
        async with aclosing(proxy.routing.async_post_call_streaming_iterator_hook(None, stream, data)) as passed:
            await anext(passed)
        await proxy.all_have_ended(2)


async def test_each_failed_try_ends_its_booking(store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_engine(FAILS) as broken, raw_engine(FAILS) as other, running_fleet(store, {}) as fleet:
        urls = {"w1": broken.url, "w2": other.url}
        for worker_id, url in urls.items():
            await fleet.report(worker_id, url)
        async with proxy_router(store, valkey_url, urls, monkeypatch) as proxy:
            data, error = await proxy.ask("acompletion")
            assert isinstance(error, litellm.InternalServerError) and len(broken.heads + other.heads) == 3
            await proxy.routing.async_post_call_failure_hook(data, error, None)
            await proxy.all_have_ended(3)


@contextmanager
def running_process(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Its output is in the folder's file `log`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not PYTHON,
    reason="LiteLLM's extra `proxy` needs rich below 14, boto3 and an older fastapi, which can't be installed beside the "
    "other extras; `make integrations` installs it in an environment of its own",
)
async def test_the_proxy_s_requests_go_where_their_prompt_is_cached(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    engine = {"num_gpu_blocks": 4_096, "decode_step_us": 20_000}
    async with running_fleet(store, dict.fromkeys(("w1", "w2", "w3"), engine)) as fleet:
        await fleet.holds("w2", list(PROMPT.encode()))
        config = {
            "model_list": [
                {
                    "model_name": "chat",
                    "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
                }
                for url in fleet.urls.values()
            ],
            "litellm_settings": {"callbacks": "kvatlas_router.litellm.proxy_server.routing"},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        port = free_port()
        environment = {
            **os.environ,
            "KVATLAS_REDIS_URL": valkey_url,
            "KVATLAS_TOKENIZER": str(save_simulators(tmp_path)),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        command = [PYTHON, "-c", "import litellm; litellm.run_server()", "--config", str(tmp_path / "config.yaml")]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with running_process(command, environment, tmp_path) as process:
            async with http_client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                async def ready() -> bool:
                    assert process.poll() is None, (tmp_path / "log").read_text()[-4_000:]
                    try:
                        return (await client.get("/health/liveliness")).status_code == 200
                    except httpx.TransportError:
                        return False

                await until(ready, what="LiteLLM's proxy listens", deadline_s=START_S)
                bases: list[str] = []

                async def settled() -> bool:
                    """Some choices fall open on a busy machine, which needs more than 10 ms to ask the store."""
                    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 2}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    bases.append(answer.headers["x-litellm-model-api-base"])
                    return bases[-5:] == [f"{fleet.urls['w2']}/v1"] * 5

                await until(
                    settled, what="five requests in a row go to the worker that holds their prompt", deadline_s=60
                )

                for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": PROMPT})):
                    streamed = {"model": "chat", "max_tokens": 200, "stream": True, **prompt}
                    async with client.stream("POST", f"/v1/{path}", json=streamed) as stream:
                        assert stream.status_code == 200
                        await anext(stream.aiter_bytes())  # and goes
                    answer = await client.post(f"/v1/{path}", json={**streamed, "max_tokens": 3})
                    assert answer.text.rstrip().endswith("data: [DONE]")

                async def all_ended() -> bool:
                    return not await store.client.zcard(BOOKINGS)

                await until(all_ended, what="every booking has ended", deadline_s=60)
