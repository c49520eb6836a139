"""The names that each worker serves: adapters are loaded and unloaded while engines run."""

from contextlib import AsyncExitStack

import pytest

from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineKind
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_publishers.engines.discovery import discover
from kvatlas_router.upstream import model_lists
from tests.eventually import until
from tests.router.proxy.engines import MODEL, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, status, well
from tests.router.proxy.test_proxy import PROMPT, decision

pytestmark = pytest.mark.anyio


async def test_a_request_for_an_adapter_goes_only_to_workers_that_have_it(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engines = [await stack.enter_async_context(faulty_engine(well)) for _ in range(3)]
        engines[1].adapters = ["sql"]
        for number, engine in enumerate(engines):
            await fleet.report(f"w{number}", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        for number in range(12):
            answer = await client.post("/v1/completions", json={"model": "sql", "prompt": [number, *PROMPT]})
            assert decision(answer)[0] == "w1"
        names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert names == [MODEL, "sql"]
        route = await client.post("/kvatlas/route", json={"model": "sql", "prompt": PROMPT})
        assert route.json()["worker"] == "w1" and "w0 (it does not serve sql)" in route.json()["explanation"]


async def test_adapters_are_noticed_when_they_come_and_go(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_router.prompts.catalogue.LIST_AGE_S", 0.05)
    assert model_lists.LIST_AGE_S > 1
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engines = [await stack.enter_async_context(faulty_engine(well)) for _ in range(2)]
        engines[0].adapters = ["sql"]
        for number, engine in enumerate(engines):
            await fleet.report(f"w{number}", engine.url)
        client = await stack.enter_async_context(running_proxy(valkey_url))

        async def chosen() -> str:
            answer = await client.post("/v1/completions", json={"model": "sql", "prompt": PROMPT})
            return decision(answer)[0] if answer.status_code == 200 else ""

        assert await chosen() == "w0"
        # unloaded, and the list not read since: the engine's refusal is enough
        engines[0].adapters, engines[1].adapters = [], ["sql"]
        engines[0].answer = status(404)

        async def moved() -> bool:
            return await chosen() == "w1"

        await until(moved, what="requests go to the other worker")
        engines[1].adapters = []

        async def is_unknown() -> bool:
            return await chosen() == ""

        await until(is_unknown, what="the name is not known any more")


async def test_sglangs_adapters_are_named_in_three_ways(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engines = [await stack.enter_async_context(faulty_engine(well)) for _ in range(3)]
        for number, engine in enumerate(engines):
            engine.adapters = ["sql"] if number else []
            written = record(f"w{number}", engine.url)
            endpoint = written.endpoint.model_copy(update={"kind": EngineKind.SGLANG})
            await FleetStore(store).write({f"w{number}": written.model_copy(update={"endpoint": endpoint})})
        await fleet.holds("w2", PROMPT, Scope(MODEL, MODEL, "sql"))
        await fleet.holds("w0", PROMPT)
        client = await stack.enter_async_context(running_proxy(valkey_url))
        base = {"model": MODEL, "prompt": PROMPT}
        ways: list[tuple[dict[str, object], str]] = [
            ({"model": "sql"}, "w2"),
            ({"model": f"{MODEL}:sql"}, "w2"),
            ({"lora_path": "sql"}, "w2"),
            ({"lora_path": None}, "w0"),
        ]
        for named, expected in ways:
            answer = await client.post("/v1/completions", json={**base, **named})
            worker_id, said = decision(answer)
            assert (answer.status_code, worker_id) == (200, expected), named
            assert int(said["cached"]) > 0, named
        for unlike in ("unknown", ["sql"], 5):  # SGLang refuses them, or takes them for a batch
            answer = await client.post("/v1/completions", json={**base, "lora_path": unlike})
            assert decision(answer)[1].get("cached", "0") == "0", unlike
        assert (await client.post("/v1/completions", json={**base, "model": f"{MODEL}:other"})).status_code == 404


async def test_a_router_is_no_engine(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}) as fleet, running_proxy(valkey_url) as client:
        with pytest.raises(Unreachable, match="is a kvatlas router, not an engine; give the engines' own addresses"):
            await discover(str(client.base_url))
        assert (await discover(fleet.urls["w1"])).model_id == MODEL
