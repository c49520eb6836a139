"""The priority of a request in vLLM's own queue: requests with little to compute come first."""

import json
import time
from contextlib import AsyncExitStack

import pytest

from kvatlas.fleet.records import EngineKind
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.router.proxy.engines import MODEL, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, well

pytestmark = pytest.mark.anyio

SHORT, LONG = list(range(100)), list(range(40_000))


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
async def test_short_work_comes_first_and_clients_may_say_otherwise(
    store: Store, valkey_url: str, kind: EngineKind
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {}))
        engine = await stack.enter_async_context(faulty_engine(well))
        written = record("w1", engine.url)
        endpoint = written.endpoint.model_copy(update={"kind": kind})
        await FleetStore(store).write({"w1": written.model_copy(update={"endpoint": endpoint})})
        client = await stack.enter_async_context(running_proxy(valkey_url, engine_priority=True))
        before_ms = time.time() * 1e3
        for body in ({"prompt": LONG}, {"prompt": SHORT}, {"prompt": SHORT, "priority": 7}):
            assert (await client.post("/v1/completions", json={"model": MODEL, **body})).status_code == 200
        asked = [json.loads(await request.body()) for request in engine.requests if b"prompt" in await request.body()]
        long, short, chosen = [one.get("priority") for one in asked if len(one["prompt"]) in (len(LONG), len(SHORT))]
        assert chosen == 7
        if kind is EngineKind.SGLANG:
            assert (long, short) == (None, None)
            return
        assert before_ms < short < long
        assert long - before_ms > 10 * 40_000 * 40 / 1e3  # ten times as long as it takes at the default rates
