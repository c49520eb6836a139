"""An engine that its fleet trusts was taken over: its answers harm neither the router nor other clients."""

from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.store.connection import Store
from kvatlas_router.upstream import engine_client
from tests.attacks.guarded_router import COMPLETIONS, completion
from tests.router.proxy.engines import running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, status, well

pytestmark = pytest.mark.anyio

MOST = 1 << 20
BUSY = {"queued_prefill_tokens": 200_000}
"""The other engine's load, so that the rogue is asked first."""


@pytest.mark.parametrize("code", [200, 400])
async def test_an_endless_answer_does_not_fill_the_router(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """JSON and errors are held in memory whole, so their length is bounded. Another engine answers."""
    monkeypatch.setattr(engine_client, "MOST_WHOLE_BYTES", MOST)

    async def endless(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(64):  # finite, so a router that keeps all of it fails this test, not the machine
                yield b" " * (MOST // 16)

        return StreamingResponse(body(), code, media_type="application/json")

    async with (
        faulty_engine(endless) as rogue,
        faulty_engine(well) as good,
        running_fleet(store, {}, {"rogue": {"url": rogue.url}, "good": {"url": good.url, **BUSY}}),
        running_proxy(valkey_url, tokenizer="none", learn=False) as client,
    ):
        answer = await client.post(COMPLETIONS, json=completion())
        assert rogue.asked
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 40


async def test_an_answer_that_can_not_be_read_passes_and_a_redirect_to_elsewhere_does_not(
    store: Store, valkey_url: str
) -> None:
    """Deep nesting is not an error for the router. A client that follows a redirect may send its key along."""
    async with (
        faulty_engine(well) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        deep = b'{"usage":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
        for body in (deep, b'{"usage":' + b"9" * 10_000 + b"}", b'{"usage":{"prompt_tokens":NaN}}'):

            async def unreadable(_: Request, body: bytes = body) -> Response:
                return Response(body, media_type="application/json")

            engine.answer = unreadable
            answer = await client.post(COMPLETIONS, json=completion())
            assert (answer.status_code, answer.content) == (200, body)
        for place, kept in (
            ("http://169.254.169.254/latest", None),
            ("https://elsewhere.test/", None),
            ("//elsewhere.test/", None),
            ("/\\elsewhere.test/", None),
            (engine.url + ".elsewhere.test/", None),
            (engine.url + "//elsewhere.test/", None),
            (engine.url + "/other?a=b", "/other?a=b"),
            ("/other", "/other"),
        ):
            engine.answer = status(307, location=place)
            answer = await client.post(COMPLETIONS, json=completion())
            assert (answer.status_code, answer.headers.get("location")) == (307, kept), place


async def test_an_engine_does_not_speak_for_the_router(store: Store, valkey_url: str) -> None:
    forged = {
        "X-KVAtlas-Queue": "full;ahead=0",
        "X-KVAtlas-Anything": "1",
        "Set-Cookie": "session=stolen",
        "X-Own": "kept",
    }

    async def lies(request: Request) -> Response:
        answer = await well(request)
        answer.headers.update(forged)
        return answer

    async with (
        faulty_engine(lies) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url, tokenizer="none") as client,
    ):
        answer = await client.post(COMPLETIONS, json=completion())
        assert (answer.status_code, answer.headers.get("x-own")) == (200, "kept")
        assert not {"x-kvatlas-queue", "x-kvatlas-anything", "set-cookie"} & answer.headers.keys()
