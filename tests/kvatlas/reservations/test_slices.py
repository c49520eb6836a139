"""Things that end all at once are removed in slices: from the first call on they don't count, and in the end nothing is left
of them."""

import pytest

from kvatlas.cost import Load
from kvatlas.reservations import Booking, LoadReport, Outcome, RedisReservations, WorkerReport
from kvatlas.reservations.redis_calls import POOL_LIBRARY, call_pool, pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.lua_text import constants
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, ask, id_of, offer, steps

pytestmark = pytest.mark.anyio

SLICE = constants(POOL_LIBRARY.source("_layout"))["SLICE"]
MANY = 3 * SLICE + 5


@pytest.fixture
def reservations(store: Store, clock: Clock) -> RedisReservations:
    return RedisReservations(store)


async def book_many(reservations: RedisReservations, router: str = "r", *workers: str) -> None:
    for number in range(MANY):
        offers = [offer((workers or ("a",))[number % max(1, len(workers))], chain=0)]
        asked = ask(offers, steps(number, 1, 2))
        await reservations.book(POOL, Booking(id_of(number), router, 1_000, asked, LEASE_US, LONGEST_US))


async def left(store: Store) -> dict[str, int]:
    names = dict(zip(["reservations", "booked", "owned", "predictions"], (2, 3, 4, 6), strict=True))
    commands = {"reservations": "hlen", "predictions": "hlen", "booked": "zcard", "owned": "zcard"}
    return {name: await getattr(store.client, commands[name])(pool_keys(POOL)[at]) for name, at in names.items()}


async def load(reservations: RedisReservations, worker_id: str = "a") -> Load:
    return (await reservations.evaluate(POOL, ask([offer(worker_id)]))).by_offer[0].load


async def purge(store: Store) -> int:
    """Number of calls until nothing that has ended is left."""
    calls = 1
    while await call_pool(store, "leave", POOL, ["nobody"]):
        calls += 1
    return calls


async def test_leaving_ends_all_of_a_routers_reservations_and_no_call_ends_more_than_a_slice(
    reservations: RedisReservations, store: Store
) -> None:
    await book_many(reservations, "r", "a", "b")
    first = await call_pool(store, "leave", POOL, ["r"])
    assert first == 1
    assert (await left(store))["reservations"] == MANY - SLICE
    await reservations.end_lease(POOL, "r")
    assert set((await left(store)).values()) == {0}
    assert (await load(reservations), await load(reservations, "b")) == (Load(), Load())


async def test_a_router_that_comes_back_while_its_reservations_are_removed_keeps_its_new_ones(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    await book_many(reservations)
    await clock.pass_us(LEASE_US)
    new = Booking(id_of(MANY), "r", 70, ask([offer("a")]), LEASE_US, LONGEST_US)
    await reservations.book(POOL, new)
    assert await purge(store) > 1
    assert (await left(store))["reservations"] == 1
    assert await load(reservations) == Load(1, 70, 0, 70)
    assert await reservations.renew_lease(POOL, "r", LEASE_US)


async def test_a_forgotten_workers_bookings_and_predictions_count_for_nothing_when_it_is_back(
    reservations: RedisReservations, store: Store
) -> None:
    await reservations.report(POOL, {"a": WorkerReport(1, LoadReport(Load(), covers=False))})
    await book_many(reservations)
    asked = ask([offer("a", chain=0)], steps(MANY - 1, 1, 2))
    assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens
    await reservations.forget(POOL, "a")
    await reservations.report(POOL, {"a": WorkerReport(2, LoadReport(Load(7), covers=False))})
    found = (await reservations.evaluate(POOL, asked)).by_offer[0]
    assert (found.load, found.predicted_tokens) == (Load(7), 0)
    assert (await left(store))["reservations"] > 0
    assert not await reservations.record_first_token(POOL, id_of(MANY - 1))
    assert not await reservations.release(POOL, id_of(MANY - 1), Outcome.FINISHED)
    await reservations.book(POOL, Booking(id_of(MANY), "r", 70, asked, LEASE_US, LONGEST_US))
    await purge(store)
    assert await load(reservations) == Load(8, 70, 0, 70)
    assert await left(store) == {"reservations": 1, "booked": 1, "owned": 1, "predictions": 1}


async def test_another_incarnation_ends_settled_predictions_in_slices_and_no_others(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    await reservations.report(POOL, {"a": WorkerReport(1)})
    await book_many(reservations)
    for number in range(0, MANY, 2):
        await reservations.record_first_token(POOL, id_of(number))
    await clock.pass_us(1)
    await reservations.report(POOL, {"a": WorkerReport(2)})
    await clock.pass_us(1)
    later = Booking(id_of(MANY), "r", 70, ask([offer("a", chain=0)], steps(MANY, 1, 2)), LEASE_US, LONGEST_US)
    await reservations.book(POOL, later)
    await purge(store)
    assert await left(store) == {
        "reservations": MANY + 1,
        "booked": MANY + 1,
        "owned": MANY + 1,
        "predictions": MANY // 2 + 1,
    }


async def test_bookings_that_a_sample_has_are_taken_off_in_slices_and_once(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    most = constants(POOL_LIBRARY.source("report"))["COVERED_MOST"]
    for number in range(2 * most + 30):
        if number % 7 == 0:
            await clock.pass_us(1)
        await reservations.book(POOL, Booking(id_of(number), "r", 10, ask([offer("a")]), LEASE_US, LONGEST_US))
    await clock.pass_us(SECOND_US)
    counted = []
    for _ in range(4):
        await reservations.report(POOL, {"a": WorkerReport(1, LoadReport(Load()))})
        counted.append((await load(reservations)).running_decodes)
        await clock.pass_us(1)
    assert counted[0] > counted[1] > counted[2] == counted[3] == 0
    assert counted[0] >= most - 7
    await reservations.end_lease(POOL, "r")
    assert await load(reservations) == Load()
