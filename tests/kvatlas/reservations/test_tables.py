"""What a choice searches is no list to the server, however few workers the pool has."""

import pytest

from kvatlas.cost import Load
from kvatlas.reservations import Booking, LoadReport, RedisReservations, WorkerReport
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, ask, id_of, offer, steps

pytestmark = pytest.mark.anyio

PARTS = {key.rpartition(":")[2].partition(".")[0]: key for key in pool_keys(POOL)}
SEARCHED = ("reservations", "anchors", "order_queued", "order_running", "order_kv", "order_mix", "samples", "booked")


async def report(reservations: RedisReservations) -> None:
    sample = LoadReport(Load(1, 100, 0, 1_000))
    await reservations.report(POOL, {name: WorkerReport(1, sample, b"likeness") for name in ("a", "b", "c")})


async def encodings(store: Store) -> set[bytes]:
    return {await store.client.object("ENCODING", PARTS[part]) for part in SEARCHED}


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
