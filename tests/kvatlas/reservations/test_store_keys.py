"""A pool's keys in the store: the server keeps what a choice searches in no list encoding, however few workers the pool has,
and once the last worker is gone, every key that is left has an expiry."""

import pytest

from kvatlas.cost import Load
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.reservations import Booking, LoadReport, Outcome, RedisReservations, WorkerReport
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, ask, id_of, offer, steps

pytestmark = pytest.mark.anyio

PARTS = {key.rpartition(":")[2].partition(".")[0]: key for key in pool_keys(POOL)}
SEARCHED = ("reservations", "anchors", "order_queued", "order_running", "order_kv", "order_mix", "samples", "booked")
ENDPOINT = EngineEndpoint(id="w", kind=EngineKind.MOCK, model_id="m", tokenizer_id="t")
RECORD = FleetRecord(endpoint=ENDPOINT, state=EngineState.UP, liveness=Liveness.ALIVE, incarnation=1)
FLEET_POOL = ENDPOINT.pool_id


async def report(reservations: RedisReservations) -> None:
    sample = LoadReport(Load(1, 100, 0, 1_000))
    await reservations.report(POOL, {name: WorkerReport(1, sample, b"likeness") for name in ("a", "b", "c")})


async def encodings(store: Store) -> set[bytes]:
    return {await store.client.object("ENCODING", PARTS[part]) for part in SEARCHED}


async def without_expiry(store: Store) -> list[str]:
    """Keys of the fleet's pool that never expire."""
    return [key for key in pool_keys(FLEET_POOL) if await store.client.ttl(key) == -1]


async def test_a_report_makes_tables_of_small_keys_and_leaves_nothing_in_them(store: Store) -> None:
    reservations = RedisReservations(store)
    await report(reservations)
    asked = ask([offer("a", chain=0)], steps(1, 1, 2))
    await reservations.book(POOL, Booking(id_of(1), "r", 1_000, asked, LEASE_US, LONGEST_US))
    assert b"listpack" in await encodings(store)
    await store.client.hdel(PARTS["groups"], "tables")  # as half a minute later
    await report(reservations)
    assert await encodings(store) == {b"hashtable", b"skiplist"}
    assert await store.client.hlen(PARTS["reservations"]) == await store.client.zcard(PARTS["booked"]) == 1
    assert await store.client.zcard(PARTS["order_mix"]) == 3
    assert await store.client.hlen(PARTS["anchors"]) == 1


async def test_routers_leases_in_a_pool_without_workers_expire(store: Store) -> None:
    fleet, reservations = FleetStore(store), RedisReservations(store)
    await fleet.write({"w": RECORD})
    asked = ask([offer("w")])
    assert await reservations.book(FLEET_POOL, Booking(id_of(1), "r", 1_000, asked, LEASE_US, LONGEST_US))
    await fleet.forget("w", FLEET_POOL)
    assert await without_expiry(store) == []
    # routers still write these
    await reservations.renew_lease(FLEET_POOL, "r", LEASE_US)
    await reservations.renew_lease(FLEET_POOL, "late", LEASE_US)
    await reservations.release(FLEET_POOL, id_of(2), Outcome.CALLED_OFF)
    await reservations.book(FLEET_POOL, Booking(id_of(3), "r", 1_000, asked, LEASE_US, LONGEST_US))
    assert await without_expiry(store) == []
    # it has a worker again: its keys stay
    await fleet.write({"w": RECORD})
    kept = [key for key in pool_keys(FLEET_POOL) if await store.client.exists(key)]
    assert await without_expiry(store) == kept
