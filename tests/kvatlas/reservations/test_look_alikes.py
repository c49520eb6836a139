"""Look-alikes: the cheapest of many workers, few of which are read, compared with looking at every one."""

import random
from typing import Any

import pytest

from kvatlas.cost import EngineProfile, Load, Plan, Prices, QuillcacheProfile
from kvatlas.reservations import (
    Ask,
    Booking,
    LoadReport,
    LookAlikes,
    LookAlikesUnknown,
    MemoryReservations,
    RedisReservations,
    Reservations,
    WorkerReport,
)
from kvatlas.reservations.likeness import RING, likeness_of, place_on_ring
from kvatlas.reservations.room_and_slo import Limit, Limits, limit_of
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import (
    LEASE_US,
    LONGEST_US,
    POOL,
    PRICES,
    SECOND_US,
    Clock,
    FullScan,
    ask,
    book,
    id_of,
    offer,
    same_evaluation,
    steps,
)
from tests.router_client.pools import worker

pytestmark = pytest.mark.anyio

ALIKE, OTHERS = b"likeness", b"likenesT"


def prices_of(output_tokens: int) -> Prices:
    return EngineProfile().prices(Plan("w", 8_192, output_tokens))


MANY_PRICES = [
    *(prices_of(tokens) for tokens in (0, 1, 50, 128, 300, 4_000)),
    PRICES,
    QuillcacheProfile().prices(Plan("w", 8_192, 128)),
    Prices(30.0, 2_000.0, 40.0, 512, 30.0),
    Prices(0.0, 0.0, 0.0, 0, 40.0),
]


def look_alike_ask(prices: Prices = PRICES, ring: int = 0, likeness: bytes = ALIKE, **other: Any) -> Ask:
    return Ask(
        other.pop("offers", ()), look_alikes=[LookAlikes(likeness, offer("", prices=prices))], ring=ring, **other
    )


async def report(reservations: Reservations, *loads: Load, likeness: bytes = ALIKE, first: int = 0) -> None:
    reports = {
        f"w{first + number:04}": WorkerReport(1, LoadReport(load), likeness, Limit(40, 900_000))
        for number, load in enumerate(loads)
    }
    await reservations.report(POOL, reports)


async def prepared(store: Store, clock: Clock) -> tuple[RedisReservations, MemoryReservations, FullScan]:
    return RedisReservations(store), MemoryReservations(clock), FullScan(clock)


@pytest.mark.parametrize("spread", ["idle", "equal", "independent", "balanced"])
async def test_of_hundreds_the_cheapest_is_found(store: Store, clock: Clock, spread: str) -> None:
    """Even if most are equal, all cost nearly the same although their loads differ, or they miss an objective that has a
    price."""
    rng = random.Random(spread)

    def load() -> Load:
        match spread:
            case "idle":
                return Load()
            case "equal":
                return Load(3, 2_000, 0, 24_000)
            case "independent":
                return Load(rng.randrange(32), rng.randrange(4_000), rng.choice([0, 0, 3]), rng.randrange(100_000))
            case _:
                running, kv_tokens = rng.randrange(32), rng.randrange(60_000)
                return Load(running, max(0, 20_000 - 128 * running - kv_tokens // 7), 0, kv_tokens)

    loads = [load() for _ in range(150)]
    stores = await prepared(store, clock)
    for reservations in stores:
        await report(reservations, *loads[:100])
        await report(reservations, *loads[100:], likeness=OTHERS, first=100)
    for number in range(30):
        prices, interference = rng.choice(MANY_PRICES), rng.choice([0.0, 0.1, 2.0])
        look_alikes = [
            LookAlikes(ALIKE, offer("", prices=prices, interference=interference)),
            LookAlikes(OTHERS, offer("", prices=prices, interference=interference, extra_us=20_000.0)),
        ]
        named = offer("w0007", prices=prices, interference=interference, extra_us=-5_000.0)
        limits = rng.choice([None, Limits([Limit()], 1_000, rng.choice([1.0, 200_000.0]), 100_000.0, 2.5)])
        asked = Ask([named], limits=limits, look_alikes=look_alikes, ring=rng.randrange(RING))
        booking = Booking(id_of(number), "r", rng.choice([100, 8_192]), asked, LEASE_US, LONGEST_US)
        in_store, in_process, every = stores
        model = await every.evaluate(POOL, asked)
        real, quick = await in_store.book(POOL, booking), await in_process.book(POOL, booking)
        assert real is not None
        assert same_evaluation(real, model)
        assert quick is not None and same_evaluation(quick, model)
        assert (await every.book(POOL, booking)) == model


async def test_few_of_many_are_read(store: Store, clock: Clock) -> None:
    reservations = RedisReservations(store)
    await report(reservations, *(Load(n % 31, 37 * n % 4_001, 0, 911 * n % 90_000) for n in range(300)))
    prices = prices_of(128)
    for number in range(30):
        asked = look_alike_ask(prices, ring=number << 26)
        found = await reservations.book(POOL, Booking(id_of(number), "r", 900, asked, LEASE_US, LONGEST_US))
        assert found is not None
        assert len(found.offers) <= 4


async def test_equals_take_turns_by_the_ring(reservations: Reservations) -> None:
    await report(reservations, *([Load()] * 40))
    places = {f"w{number:04}": place_on_ring(f"w{number:04}") for number in range(40)}
    chosen = set()
    for number in range(64):
        ring = number << 26
        found = await reservations.evaluate(POOL, look_alike_ask(ring=ring))
        assert found.worker_id == min(places, key=lambda id: (places[id] - ring) % RING)
        chosen.add(found.worker_id)
    assert len(chosen) > 20


async def test_full_members_are_passed_over(reservations: Reservations) -> None:
    await report(reservations, *(Load(40, 0, 0, 0) for _ in range(30)), Load(39, 90_000, 0, 0))
    limits = Limits([], 1_000)
    assert (await reservations.evaluate(POOL, look_alike_ask(limits=limits))).worker_id == "w0030"
    anyone = Limits([], 1_000, look_alikes_have_room=True)
    assert (await reservations.evaluate(POOL, look_alike_ask(limits=anyone))).worker_id != "w0030"
    await reservations.report(POOL, {"w0030": WorkerReport(1, LoadReport(Load(40, 90_000)), ALIKE, Limit(40))})
    assert (await reservations.evaluate(POOL, look_alike_ask(limits=limits))).worker_id != "w0030"


async def test_members_of_unknown_load_count_with_the_mean_of_the_others(
    reservations: Reservations, clock: Clock
) -> None:
    await report(reservations, *([Load(9, 900)] * 12), Load(1, 100))
    await clock.pass_us(3 * SECOND_US)
    await reservations.report(POOL, {"late": WorkerReport(1, LoadReport(Load(5, 700)), ALIKE)})
    await reservations.report(POOL, {"silent": WorkerReport(1, None, ALIKE)})
    assert (await reservations.evaluate(POOL, look_alike_ask())).worker_id == "w0012"
    await clock.pass_us(2 * SECOND_US)  # now only one of the samples is believed
    for skipped, chosen, load in [((), "late", Load(5, 700)), (("late",), "silent", Load())]:
        ring = (place_on_ring(chosen) - 1) % RING
        found = await reservations.evaluate(POOL, look_alike_ask(ring=ring, skipped=skipped))
        assert (found.worker_id, found.by_offer[found.chosen].load) == (chosen, load)


async def test_a_member_that_is_predicted_to_hold_the_prompt_is_seen(reservations: Reservations) -> None:
    await report(reservations, *([Load()] * 30))
    chain = steps(1, 2, 3, 4, 5, 6, 7)
    held = ask([offer("w0021", chain=0)], chain)
    await book(reservations, 1, held)
    await reservations.record_first_token(POOL, id_of(1))
    group = LookAlikes(ALIKE, offer("", chain=0))
    asked = Ask([], held.chains, 16.0, look_alikes=[group], ring=place_on_ring("w0003"))
    found = await reservations.evaluate(POOL, asked)
    assert (found.worker_id, found.by_offer[found.chosen].predicted_tokens) == ("w0021", 7 * 128)
    await book(reservations, 2, asked)
    assert (await reservations.evaluate(POOL, ask([offer("w0021")]))).by_offer[0].load.running_decodes == 2


async def test_workers_that_are_named_or_skipped_are_no_members(reservations: Reservations) -> None:
    await report(reservations, Load(), Load(1), Load(2))
    assert (await reservations.evaluate(POOL, look_alike_ask())).worker_id == "w0000"
    assert (await reservations.evaluate(POOL, look_alike_ask(skipped=["w0000"]))).worker_id == "w0001"
    named = [offer("w0000", extra_us=90_000.0)]
    assert (await reservations.evaluate(POOL, look_alike_ask(offers=named, skipped=["w0001"]))).worker_id == "w0002"


async def test_a_member_that_is_cheaper_than_a_named_equal_by_less_than_a_microsecond_is_chosen(
    reservations: Reservations,
) -> None:
    await report(reservations, Load(), Load())
    for named, other in (("w0000", "w0001"), ("w0001", "w0000")):
        asked = look_alike_ask(offers=[offer(named, extra_us=0.25)], ring=place_on_ring(named))
        assert (await reservations.evaluate(POOL, asked)).worker_id == other


async def test_a_worker_that_is_skipped_and_offered_counts_for_the_mean(reservations: Reservations) -> None:
    await report(reservations, Load(7, 187, 0, 8_223))
    both = [offer("silent"), offer("w0000", extra_us=90_000_000.0)]
    found = await reservations.evaluate(POOL, look_alike_ask(offers=both, skipped=["w0000"]))
    assert (found.worker_id, found.by_offer[0].load) == ("silent", Load(7, 187, 0, 8_223))


async def test_a_worker_that_gets_no_requests_now_is_no_member(reservations: Reservations) -> None:
    await report(reservations, Load(), Load(1))
    await report(reservations, Load(), likeness=b"")
    assert (await reservations.evaluate(POOL, look_alike_ask())).worker_id == "w0001"
    await reservations.forget(POOL, "w0001")
    with pytest.raises(LookAlikesUnknown):
        await reservations.evaluate(POOL, look_alike_ask())


async def test_fewer_look_alikes_than_the_asker_knows_are_refused_and_nothing_is_booked(
    reservations: Reservations,
) -> None:
    await report(reservations, Load(), Load())
    booking = Booking(id_of(1), "r", 900, look_alike_ask(least_members=3), LEASE_US, LONGEST_US)
    with pytest.raises(LookAlikesUnknown, match="expected at least 3|fewer than 3"):
        await reservations.book(POOL, booking)
    assert (await reservations.evaluate(POOL, ask([offer("w0000")]))).by_offer[0].load == Load()
    assert (await reservations.evaluate(POOL, look_alike_ask(least_members=2))).worker_id in ("w0000", "w0001")


def test_likeness_is_what_a_request_costs_the_same_on() -> None:
    a, b = worker("a", load={"running_decodes": 3}), worker("b")
    assert likeness_of(a) == likeness_of(b) != b""
    assert likeness_of(worker("a", block_size=32)) != likeness_of(a)
    assert likeness_of(worker("a", transfer_groups=("g",))) != likeness_of(a)
    assert likeness_of(a.model_copy(update={"state": "draining"})) == b""
    metrics = {"forward_pass": {"total_kv_blocks": 77, "total_request_slots": 9}}
    assert likeness_of(worker("a", load=metrics)) == likeness_of(a)
    assert likeness_of(worker("a", load=metrics, events=False)) != likeness_of(worker("a", events=False))
    assert (limit_of(worker("a", load=metrics)), limit_of(b)) == (Limit(9, 77 * 16), Limit())
