"""A router that stops is first not ready; running requests end, and those that take too long get an error."""

import json
from collections.abc import AsyncIterator
from functools import partial

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.settings import ProxySettings
from kvatlas.store.connection import Store
from kvatlas_router.proxy_service import run_proxy
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet
from tests.router.proxy.faulty_engine import Answer, faulty_engine

pytestmark = pytest.mark.anyio

EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


def stream_until(last: anyio.Event) -> Answer:
    """A stream that ends when `last` is set."""

    async def answer(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield EVENT
            await last.wait()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return answer


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_stopping_router_is_not_ready_and_lets_streams_end(
    store: Store, valkey_url: str, in_time: bool
) -> None:
    last = anyio.Event()
    async with running_fleet(store, {}) as fleet, faulty_engine(stream_until(last)) as engine:
        await fleet.report("w1", engine.url)
        settings = ProxySettings.load(
            redis_url=valkey_url, port=0, tokenizer="none", drain_s=2, grace_s=30 if in_time else 0.2
        )
        urls: list[str] = []
        stopped = anyio.Event()
        texts: list[str] = []

        async def run(scope: anyio.CancelScope) -> None:
            with scope:
                await run_proxy(settings, urls.append)
            stopped.set()

        async def read(client: httpx.AsyncClient, began: anyio.Event) -> None:
            body = {"model": MODEL, "prompt": "a", "stream": True}
            text = ""
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_text():
                    text += part
                    began.set()
            texts.append(text)

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(run, scope)
            await until(lambda: urls, what="the router listens")
            async with http_client(base_url=urls[0], timeout=60) as client:
                began = anyio.Event()
                tasks.start_soon(read, client, began)
                await began.wait()
                assert (await client.get("/ready")).status_code == 200
                scope.cancel()

                async def is_not_ready() -> bool:
                    return (await client.get("/ready")).status_code == 503

                await until(is_not_ready, what="it is not ready any more")
                answer = await client.get("/v1/models")  # it still answers
                assert answer.status_code == 200

                async def refuses() -> bool:
                    try:
                        async with http_client(base_url=urls[0]) as other:
                            await other.get("/health")
                    except httpx.ConnectError:
                        return True
                    except (httpx.ReadError, httpx.RemoteProtocolError):  # it was just closing
                        return False
                    return False

                await until(refuses, what="it listens no more")
                if in_time:
                    assert not stopped.is_set()
                    last.set()
                with anyio.fail_after(20):
                    await stopped.wait()
            await until(lambda: texts, what="the stream is over")
        last.set()
        (text,) = texts
        if in_time:
            assert text == EVENT.decode() + "data: [DONE]\n\n"
        else:
            first, second = text.strip().split("\n\n")
            assert first == EVENT.decode().strip()
            assert "the router is stopping" in json.loads(second.removeprefix("data: "))["error"]["message"]


async def test_a_router_without_requests_stops_at_once(store: Store, valkey_url: str) -> None:
    settings = ProxySettings.load(redis_url=valkey_url, port=0, tokenizer="none", drain_s=0, grace_s=600)
    async with running_fleet(store, {}):
        up = anyio.Event()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(run_proxy, settings, lambda _: up.set()))
                await up.wait()
                tasks.cancel_scope.cancel()
