"""A pool whose last worker is gone leaves nothing in the store that never expires."""

import pytest

from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.reservations import Booking, Outcome, RedisReservations
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, ask, id_of, offer

pytestmark = pytest.mark.anyio

ENDPOINT = EngineEndpoint(id="w", kind=EngineKind.MOCK, model_id="m", tokenizer_id="t")
RECORD = FleetRecord(endpoint=ENDPOINT, state=EngineState.UP, liveness=Liveness.ALIVE, incarnation=1)
POOL = ENDPOINT.pool_id


async def without_expiry(store: Store) -> list[str]:
    """The pool's keys that never expire."""
    return [key for key in pool_keys(POOL) if await store.client.ttl(key) == -1]


async def test_routers_leases_in_a_pool_without_workers_expire(store: Store) -> None:
    fleet, reservations = FleetStore(store), RedisReservations(store)
    await fleet.write({"w": RECORD})
    asked = ask([offer("w")])
    assert await reservations.book(POOL, Booking(id_of(1), "r", 1_000, asked, LEASE_US, LONGEST_US))
    await fleet.forget("w", POOL)
    assert await without_expiry(store) == []
    # what routers still write
    await reservations.renew_lease(POOL, "r", LEASE_US)
    await reservations.renew_lease(POOL, "late", LEASE_US)
    await reservations.release(POOL, id_of(2), Outcome.CALLED_OFF)
    await reservations.book(POOL, Booking(id_of(3), "r", 1_000, asked, LEASE_US, LONGEST_US))
    assert await without_expiry(store) == []
    # it has a worker again: its keys stay
    await fleet.write({"w": RECORD})
    kept = [key for key in pool_keys(POOL) if await store.client.exists(key)]
    assert await without_expiry(store) == kept
