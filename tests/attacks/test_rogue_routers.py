"""A router, or anyone with its user's password, gives the others false information: requests are served all the same."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvatlas.ejection import EjectionChange, EjectionStore, Verdict
from kvatlas.fleet_store.allowances import MOST_DEBT, Draw
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.predictions.accuracy import AnswerCounts, AnswerReport
from kvatlas.predictions.store import write_answer_report
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from kvatlas.store.connection import Store
from tests.attacks.guarded_router import COMPLETIONS, router_process
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, SCOPE, running_fleet

pytestmark = pytest.mark.anyio

POOL = SCOPE.pool_id
BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}


@asynccontextmanager
async def asked_router(store: Store, valkey_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_fleet(store, {"w1": {}, "w2": {}, "w3": {}}),
        router_process(valkey_url) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        yield client


async def serves(client: httpx.AsyncClient) -> bool:
    return all([(await client.post(COMPLETIONS, json=BODY)).status_code == 200 for _ in range(6)])


async def test_false_figures_of_a_router_stop_no_request_of_others(store: Store, valkey_url: str) -> None:
    """Ejections of every worker, impossible rates, reports, bookings that fill every worker, and invalid records."""
    async with asked_router(store, valkey_url) as client:
        assert await serves(client)
        rogue = EjectionStore(store)
        for times in range(3):
            changes = [EjectionChange(f"w{n}", 0.0, 1e6, Verdict.EJECT, times, 1e9) for n in (1, 2, 3)]
            await rogue.exchange(POOL, "rogue", changes)
        assert await serves(client), "at most half of a pool is left out"
        form = [word for n in (1, 2, 3) for word in (f"w{n}", b"\xc1 no evidence")]
        await store.client.hset(pool_keys(POOL)[16], items=form)
        counts = AnswerCounts(prompts_differ=1 << 60)
        await write_answer_report(store, "rogue", POOL, AnswerReport(counts=counts, stalled=("w1", "w2", "w3")))
        assert await serves(client)
        for key in pool_keys(POOL)[1:16]:
            await store.client.delete(key)
            await store.client.set(key, b"no table")
        assert await serves(client)
        for part in pool_keys(POOL)[1:4]:
            await store.client.delete(part)
            await store.client.hset(part, mapping={f"w{n}": b"damaged" for n in (1, 2, 3)})
        assert await serves(client)
        await POOL_LIBRARY.call(store, "kvatlas_pool_leave", pool_keys(POOL), ["every router"])
        assert await serves(client)


async def test_a_router_that_spends_others_allowances_costs_them_ten_minutes_at_most(store: Store) -> None:
    fleet = FleetStore(store)
    for back in (-(1 << 50), -(1 << 50), 1 << 50):
        (drawn,) = await fleet.draw([Draw("requests:acme", 60, back, 0)])
        assert -MOST_DEBT * 60 <= drawn.left <= 60
