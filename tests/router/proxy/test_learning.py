"""Rates learned from answers that pass through the proxy, and from `/kvatlas/done`."""

from math import inf
from typing import Any

import httpx
import pytest

from kvatlas.cost.regression import Evidence, Latency
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import Store
from router_client.learning import timings
from tests.eventually import until
from tests.router.proxy.engines import MODEL, SCOPE, running_fleet, running_proxy

pytestmark = pytest.mark.anyio


async def complete(client: httpx.AsyncClient, number: int, **body: Any) -> None:
    asked = {"model": MODEL, "prompt": [number] * 64, **body}
    assert (await client.post("/v1/completions", json=asked)).status_code == 200


async def learned_from(store: Store, requests: int) -> Evidence:
    """The evidence, once it has been learned from this many requests."""

    found = Evidence()

    async def enough() -> bool:
        nonlocal found
        found = (await RedisReservations(store).read_evidence(SCOPE.pool_id)).get("w1", found)
        return found.requests >= requests

    await until(enough, what=f"{requests} requests are learned from")
    assert found.requests == requests
    return found


def rows(evidence: Evidence, kind: Latency) -> float:
    """Number of recently measured times of a kind."""
    return evidence.sums[2 * kind + 1]


@pytest.fixture
def on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, times that this process measures late would not be learned from."""
    monkeypatch.setattr(timings, "MOST_LATE", inf)


@pytest.mark.usefixtures("on_time")
async def test_streams_and_answers_of_one_token_teach_rates(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {"speed_up": 20}}), running_proxy(valkey_url) as client:
        await complete(client, 1, max_tokens=8, stream=True)
        await complete(client, 2, max_tokens=1)
        await complete(client, 3, max_tokens=8)  # in one piece: it is unknown when its first token was there
        await complete(client, 4, max_tokens=8, stream=True, n=2)
        evidence = await learned_from(store, 2)
        assert rows(evidence, Latency.TTFT) > rows(evidence, Latency.TPOT) > 0


@pytest.mark.usefixtures("on_time")
async def test_done_teaches_rates(store: Store, valkey_url: str) -> None:
    usage = {"prompt_tokens": 64, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        ends: list[dict[str, Any]] = [
            {"usage": usage, "timings": {"ttft_us": 5_000, "tpot_us": 7_000.5}},
            {"usage": usage, "timings": {"ttft_us": 5_000}},
            {"usage": usage},  # then the time of their first_token counts
            {"usage": usage, "failed": True, "timings": {"ttft_us": 5_000}},
        ]
        for number, done in enumerate(ends):
            id = (await client.post("/kvatlas/route", json={"token_ids": [number] * 64})).json()["id"]
            await client.post("/kvatlas/done", json={"id": id, "phase": "first_token"})
            assert (await client.post("/kvatlas/done", json={"id": id, **done})).json() == {"known": True}
        evidence = await learned_from(store, 3)
        assert rows(evidence, Latency.TTFT) > 2 * rows(evidence, Latency.TPOT) > 0


@pytest.mark.parametrize("given", ["5 ms", {"ttft_us": "5"}, {"tpot_us": True}])
async def test_timings_that_are_not_times_are_an_error(store: Store, valkey_url: str, given: object) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        id = (await client.post("/kvatlas/route", json={"token_ids": [1] * 64})).json()["id"]
        answer = await client.post("/kvatlas/done", json={"id": id, "timings": given})
        assert answer.status_code == 400 and "timings" in answer.json()["error"]["message"]


async def test_learning_can_be_switched_off(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}):
        async with running_proxy(valkey_url, learn=False) as client:
            await complete(client, 1, max_tokens=1)
        assert await RedisReservations(store).read_evidence(SCOPE.pool_id) == {}
