"""`kvatlas rates` against a real store."""

import asyncio
import json

import pytest

from kvatlas.cost import EngineRates, Plan
from kvatlas.cost.learned_rates import FinishedRequest, estimate_of, rows_of
from kvatlas.cost.regression import Evidence
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import connected_store
from tests.kvatlas_cli.conftest import Cli


def test_rates_are_the_defaults_until_they_are_learned(cli: Cli, fleet_store_url: str) -> None:
    asyncio.run(
        _learn_rates(
            fleet_store_url, "w2", FinishedRequest(Plan("w2", 1_000, 10), 1_000, 10, 0, ttft_us=200_000, tpot_us=14_000)
        )
    )
    done = cli("rates", "--json", "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    found = {entry["worker"]: entry for entry in json.loads(done.out)}
    assert {id: entry["requests"] for id, entry in found.items()} == {"w1": 0, "w2": 20}
    assert found["w2"]["rates"]["prefill_us_per_token"] > 100
    assert found["w1"]["rates"]["prefill_us_per_token"] == pytest.approx(40)
    table = cli("rates", "--redis-url", fleet_store_url)
    assert table.code == 0 and "2 workers" in table.out
    assert "25 / 50 / 200 / 1250" in next(line for line in table.out.splitlines() if "w1" in line)


async def _learn_rates(url: str, worker_id: str, request: FinishedRequest) -> None:
    """Record the rates of a worker from twenty equal requests."""
    async with connected_store(url, wait=False) as store:
        (pool_id,) = await FleetStore(store).pools()
        for _ in range(20):
            reservations = RedisReservations(store)
            known = (await reservations.read_evidence(pool_id)).get(worker_id, Evidence())
            learned = Evidence.of(rows_of(request), estimate_of(known, EngineRates()))
            await reservations.add_evidence(pool_id, {worker_id: learned})
