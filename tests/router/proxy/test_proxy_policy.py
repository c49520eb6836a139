"""The proxy's policy: advice and shedding, sessions, selection; and both workers of a pair over `/kvatlas/route`."""

from typing import Any

import pytest

from kvatlas.fleet.records import EngineKind, Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from router_client.pricing.surcharges import session_worker
from tests.eventually import until
from tests.router.proxy.engines import MODEL, SCOPE, record, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

ASK = {"model": MODEL, "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "max_tokens": 2}
LATE: dict[str, Any] = {"queued_prefill_tokens": 100_000}
"""4 s of work: five times what the SLO allows for the first token."""


async def test_advice_is_given_always_and_followed_only_if_configured(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}}) as fleet:
        for worker_id in fleet.urls:
            await fleet.report(worker_id, **LATE)
        async with running_proxy(valkey_url) as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 200
            assert answer.headers["x-kvatlas-decision"].endswith(";advice=shed")
            assert (await client.post("/kvatlas/route", json=ASK)).json()["advice"] == "shed"
        async with running_proxy(valkey_url, shed=True) as client:
            for path in ("/v1/completions", "/kvatlas/route"):
                refused = await client.post(path, json=ASK)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "4")
                assert "miss the SLO" in refused.text
            counted = (await client.get("/status")).json()
            assert (counted["proxy"]["shed"], counted["proxy"]["sent"], counted["proxy"]["gave_up"]) == (2, 0, 0)

            async def released() -> bool:
                return not await store.client.hlen(f"kva:{{pool:{SCOPE.pool_id}}}:reservations.2")

            await until(released, what="bookings of refused requests are released")
        async with running_proxy(valkey_url, shed=True, slo_ttft_ms=60_000, slo_tpot_ms=1) as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 200 and ";advice=queue" in answer.headers["x-kvatlas-decision"]
        await fleet.report("w1")
        async with running_proxy(valkey_url, shed=True) as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 200 and "advice" not in answer.headers["x-kvatlas-decision"]


async def test_a_session_keeps_its_worker_and_selection_holds(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}, "w3": {}}):
        async with running_proxy(valkey_url, session_ms=10_000) as client:
            for session in ("a", "b", "c", "d"):
                home = session_worker(session, ["w1", "w2", "w3"])
                for number in range(3):
                    asked = {**ASK, "prompt": [number] * 9}
                    by_header = await client.post("/v1/completions", json=asked, headers={"X-Session-ID": session})
                    by_key = await client.post("/v1/completions", json={**asked, "prompt_cache_key": session})
                    for answer in (by_header, by_key):
                        assert answer.headers["x-kvatlas-decision"].startswith(f'"{home}"')
        async with running_proxy(valkey_url, allow_workers="w1,w3", deny_workers="w1") as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.headers["x-kvatlas-decision"].startswith('"w3"')
        async with running_proxy(valkey_url, select_labels="zone=1") as client:
            refused = await client.post("/v1/completions", json=ASK)
            assert refused.status_code == 503
            assert "its label zone is absent; expected 1" in refused.text


async def test_route_returns_both_workers_of_a_pair(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {}):
        records = {}
        for worker_id, role, rank in (("p", Role.PREFILL, 2), ("d", Role.DECODE, None)):
            made = record(worker_id, f"http://{worker_id}")
            endpoint = made.endpoint.model_copy(update={"role": role, "kind": EngineKind.SGLANG, "dp_rank": rank})
            records[worker_id] = made.model_copy(update={"endpoint": endpoint})
        await FleetStore(store).write(records)
        async with running_proxy(valkey_url) as client:
            assert (await client.post("/kvatlas/route", json={"token_ids": [1] * 99})).status_code == 503
            answer = (await client.post("/kvatlas/route", json={"token_ids": [1] * 99, "pd": True})).json()
            assert (answer["worker"], answer["url"], answer["headers"]) == ("d", "http://d", {})
            prefill = {"worker": "p", "url": "http://p", "headers": {"X-Data-Parallel-Rank": "2"}}
            assert answer["prefill"] == {**prefill, "protocol": "bootstrap", "bootstrap_port": 8998}
            for phase in ("first_token", "done"):
                done = await client.post("/kvatlas/done", json={"id": answer["id"], "phase": phase})
                assert done.json() == {"known": True}
            wrong = await client.post("/kvatlas/route", json={"token_ids": [1], "pd": "yes"})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["message"] == "pd is 'yes'; expected true or false"
