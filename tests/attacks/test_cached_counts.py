"""A tenant tries to learn from engines' counts what others asked."""

from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import (
    ACME,
    CHAT,
    COMPLETIONS,
    OPERATOR,
    OTHER,
    WATCHER,
    bearer,
    completion,
    guarded_router,
)
from tests.http_client import http_client
from tests.router.answers.counted_answers import ANSWERS, DONE
from tests.router.proxy.engines import MODEL, running_fleet
from tests.router.proxy.faulty_engine import faulty_engine

pytestmark = pytest.mark.anyio


async def test_salts_keep_tenants_apart_on_a_shared_engine(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """Neither the engine's own count of cached tokens nor its response time reveals what another tenant asked."""
    async with (
        running_fleet(store, {"shared": {"num_gpu_blocks": 4_096}}),
        guarded_router(valkey_url, tmp_path, None, "--salt-is-tenant") as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):

        async def cached(key: str, path: str = COMPLETIONS, **more: object) -> int:
            answer = await client.post(path, json=completion(**more), headers=bearer(key))
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"].get("prompt_tokens_details") or {}
            return details.get("cached_tokens") or 0

        assert await cached(ACME) == 0
        assert await cached(ACME) > 100
        assert await cached(OTHER) == 0
        for salt in ("acme", "acme/", "/acme", "../acme", ""):
            assert await cached(OTHER, cache_salt=salt, user=salt) in (0, *([] if salt else [await cached(OTHER)]))
        assert await cached(ACME) > 100


@pytest.mark.parametrize("salted", [False, True])
async def test_without_salts_no_answer_says_what_is_cached(
    store: Store, valkey_url: str, tmp_path: Path, salted: bool
) -> None:
    """In any of the engines' formats. Callers that may see decisions get what the engine wrote, as do tenants with salts."""

    async def count(request: Request) -> Response:
        return Response(written.counted, media_type="text/event-stream" if written.streamed else "application/json")

    async with (
        faulty_engine(count) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path, None, *(["--salt-is-tenant"] if salted else [])) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for written in ANSWERS:
            asked = {"model": MODEL, **written.prompt, "stream": written.streamed}
            if written.path in (CHAT, COMPLETIONS) and written.streamed:
                asked["stream_options"] = {"include_usage": True}
            for key, seen in ((OTHER, salted), (WATCHER, True)):
                answer = await client.post(written.path, json=asked, headers=bearer(key))
                assert answer.content == (written.counted if seen else written.uncounted)


async def test_routers_learn_from_the_counts_that_they_hide(store: Store, valkey_url: str, tmp_path: Path) -> None:
    async with (
        running_fleet(store, {"shared": {"num_gpu_blocks": 4_096}}),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for streamed in (False, True):
            for _ in range(2):
                asked = completion(stream=streamed, stream_options={"include_usage": True} if streamed else None)
                answer = await client.post(COMPLETIONS, json=asked, headers=bearer(OTHER))
                assert answer.status_code == 200 and b'"cached_tokens":' not in answer.content.replace(b":null", b"")
        status = await client.get(f"{router.control}/status", headers=bearer(OPERATOR))
        assert status.json()["answers"]["cached_equal"] > 0


@pytest.mark.parametrize("length", [5 << 20, 40 << 20])
async def test_no_length_of_an_event_shows_what_is_cached(
    store: Store, valkey_url: str, tmp_path: Path, length: int
) -> None:
    """A longer one is not passed on, and its engine is not blamed: a client can ask for such events."""

    async def count(request: Request) -> Response:
        text = b'data: {"text":"%s","meta_info":{"cached_tokens":4,"finish_reason":{"type":"stop"}}}\n\n' % (
            b"a" * length
        )
        return Response(text + DONE, media_type="text/event-stream")

    async with (
        faulty_engine(count) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        asked = {"model": MODEL, "text": "Hi", "stream": True}
        for _ in range(4):
            answer = await client.post("/generate", json=asked, headers=bearer(OTHER))
            assert b"cached_tokens" not in answer.content
            assert (answer.status_code, len(answer.content) > length) == (
                (200, True) if length < 32 << 20 else (400, False)
            )
        counted = (await client.get(f"{router.control}/status", headers=bearer(OPERATOR))).json()
        assert counted["outliers"]["bad"] == 0 and not counted["ejected"]
