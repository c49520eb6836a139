"""An engine that its fleet trusts, and that someone has taken over: what it answers costs the router and others nothing."""

from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.store.connection import Store
from kvatlas_router.upstream import engine_client
from tests.attacks.guarded_router import COMPLETIONS, completion
from tests.router.proxy.engines import running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, well

pytestmark = pytest.mark.anyio

MOST = 1 << 20
BUSY = {"queued_prefill_tokens": 200_000}
"""The other engine's load, so that the rogue is asked first."""


@pytest.mark.parametrize("code", [200, 400])
async def test_an_endless_answer_does_not_fill_the_router(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """JSON and errors are kept whole, so their length is bounded. Another engine answers."""
    monkeypatch.setattr(engine_client, "MOST_WHOLE_BYTES", MOST)

    async def endless(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(64):  # it ends, so that a router that keeps all of it fails this test and not the machine
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
