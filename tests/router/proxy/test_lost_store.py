"""When the store goes away, the proxy continues with what it knew, and recovers by itself."""

from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import anyio
import pytest

from kvatlas.embedded import valkey_server
from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store, connected_store, open_store
from tests.chaos.proxy import TcpProxy
from tests.eventually import until
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.test_proxy import PROMPT, decision

pytestmark = pytest.mark.anyio

REQUESTS = 20
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}


async def test_no_request_is_lost_while_the_store_is_away() -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    async with anyio.create_task_group() as tasks:
        ended, up = anyio.Event(), anyio.Event()

        async def serve() -> None:
            async with valkey_server(port=port):
                up.set()
                await ended.wait()

        tasks.start_soon(serve)
        await up.wait()
        store = await open_store(url, wait=False)
        async with running_fleet(store, {"w1": {}, "w2": {}}) as fleet, running_proxy(url) as client:
            await fleet.holds("w2", PROMPT)
            assert decision(await client.post("/v1/completions", json=BODY))[0] == "w2"
            ended.set()

            async def is_without_store() -> bool:
                answer = await client.post("/v1/completions", json=BODY)
                assert answer.status_code == 200
                return decision(answer)[1]["by"] != "cost"

            await until(is_without_store, what="a decision without the store")
            for streamed in (True, False):
                answer = await client.post("/v1/completions", json={**BODY, "stream": streamed})
                assert answer.status_code == 200
            async with (
                valkey_server(port=port),
                connected_store(url, wait=False) as again,
                running_fleet(again, {}) as refilled,
            ):
                for worker_id in ("w1", "w2"):
                    await refilled.report(worker_id, fleet.urls[worker_id])

                async def is_with_store() -> bool:
                    answer = await client.post("/v1/completions", json=BODY)
                    assert answer.status_code == 200
                    return decision(answer)[1]["by"] == "cost"

                await until(is_with_store, what="a decision with the store again")
        await store.close()


async def test_no_request_waits_for_a_store_that_hangs(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_router.prompts.catalogue.FLEET_AGE_S", 0.001)  # each request finds the records too old
    address = urlsplit(valkey_url)
    assert address.port is not None
    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(TcpProxy(address.port, "store"))
        fleet = await stack.enter_async_context(running_fleet(store, {"w1": {}, "w2": {}}))
        url = valkey_url.replace(f":{address.port}", f":{line.port}")
        client = await stack.enter_async_context(running_proxy(url, decision_deadline_ms=10, tokenizer="none"))
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert fleet.urls.keys() == {"w1", "w2"}
        line.stall()
        try:
            with anyio.fail_after(REQUESTS):  # the store's own limit is 5 s per call
                for _ in range(REQUESTS):
                    answer = await client.post("/v1/completions", json={**BODY, "stream": True})
                    assert answer.status_code == 200
                    assert (await client.get("/v1/models")).status_code == 200
            assert decision(answer)[1]["open"] in ("index", "booking")
        finally:
            line.heal()
