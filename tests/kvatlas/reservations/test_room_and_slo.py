"""Limits: which workers have room, which would miss the SLO, and how that changes the choice; in the store and in process."""

from dataclasses import replace

import pytest

from kvatlas.cost import Load
from kvatlas.reservations import Ask, Booking, Evaluation, LoadReport, Reservations, WorkerReport
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit, Limits, Over, level
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, id_of, offer

pytestmark = pytest.mark.anyio


async def report(reservations: Reservations, **loads: Load) -> None:
    await reservations.report(POOL, {id: WorkerReport(1, LoadReport(load)) for id, load in loads.items()})


async def evaluate(
    reservations: Reservations, *each: Limit, extra_us: float = 100_000.0, **limits: float
) -> Evaluation:
    """Evaluate offers to workers a, b, ..., each more expensive than the one before."""
    offers = [offer(chr(ord("a") + i), extra_us=i * extra_us) for i in range(len(each))]
    made = replace(Limits(each, 1_000), **limits)  # type: ignore[arg-type]
    return await reservations.evaluate(POOL, Ask(offers, limits=made))


async def test_a_worker_whose_slots_are_taken_is_left_out(reservations: Reservations) -> None:
    await report(reservations, a=Load(3), b=Load())
    for slots, chosen, over in [(0, 0, 0), (4, 0, 0), (3, 1, Over.SLOTS), (2, 1, Over.SLOTS)]:
        found = await evaluate(reservations, Limit(slots, 0), Limit(8, 0))
        assert (found.chosen, found.by_offer[0].over, found.by_offer[1].over) == (chosen, over, 0)


async def test_bookings_of_all_routers_take_slots(reservations: Reservations) -> None:
    await report(reservations, a=Load(), b=Load())
    for number, chosen in enumerate([0, 0, 1, 1, 0]):  # then none has room, and the cheaper one gets it
        offers = [offer("a"), offer("b", extra_us=1e9)]
        ask = Ask(offers, limits=Limits([Limit(2, 0), Limit(2, 0)], 1_000))
        found = await reservations.book(POOL, Booking(id_of(number), f"r{number}", 1_000, ask, LEASE_US, LONGEST_US))
        assert found is not None
        assert found.chosen == chosen


async def test_a_worker_whose_free_kv_is_too_small_for_the_prompt_is_left_out(reservations: Reservations) -> None:
    await report(reservations, a=Load(0, 500, 0, 2_000), b=Load())  # requests waiting there need their KV first
    for kv_tokens, chosen in [(0, 0), (3_500, 0), (3_499, 1)]:
        found = await evaluate(reservations, Limit(0, kv_tokens), Limit(0, 9_000))
        assert (found.chosen, found.by_offer[0].over) == (chosen, Over.KV if chosen else 0)


async def test_cached_tokens_need_no_new_kv(reservations: Reservations) -> None:
    await report(reservations, a=Load(0, 0, 0, 2_000))
    for held_steps, over in [(0, Over.KV), (4, 0)]:
        ask = Ask([offer("a", held_steps=held_steps)], limits=Limits([Limit(0, 2_600)], 1_000))
        assert (await reservations.evaluate(POOL, ask)).by_offer[0].over == over


async def test_a_worker_of_unknown_load_is_not_left_out(reservations: Reservations, clock: Clock) -> None:
    await report(reservations, a=Load(9, 0, 0, 9_000))
    assert (await evaluate(reservations, Limit(1, 1), UNKNOWN_LIMIT)).chosen == 1
    await clock.pass_us(6 * SECOND_US)
    assert (await evaluate(reservations, Limit(1, 1), UNKNOWN_LIMIT)).chosen == 0


async def test_missing_the_slo_costs_or_leaves_out(reservations: Reservations) -> None:
    """`a` has 40,500 us of prefill and 400,000 us of backlog, `b` 300,000 us more of everything else."""
    await report(reservations, a=Load(0, 10_000), b=Load(0, 0))
    each, dearer = (UNKNOWN_LIMIT, UNKNOWN_LIMIT), {"extra_us": 500_000.0}
    assert (await evaluate(reservations, *each, **dearer)).chosen == 0
    judged = await evaluate(reservations, *each, **dearer, ttft_us=200_000.0)
    assert [one.over for one in judged.by_offer] == [Over.TTFT, 0]
    assert judged.by_offer[0].missed_us == pytest.approx(400_000 + 40_500 - 200_000)
    assert judged.chosen == 0  # only reported
    for factor, chosen in [(0.25, 0), (1.0, 1)]:
        assert (await evaluate(reservations, *each, **dearer, ttft_us=200_000.0, slo_factor=factor)).chosen == chosen
    assert (await evaluate(reservations, *each, **dearer, ttft_us=200_000.0, slo_filters=True)).chosen == 1
    assert (await evaluate(reservations, *each, **dearer, ttft_us=10.0, slo_filters=True)).chosen == 0  # both miss it


async def test_slow_tokens_miss_the_slo_too(reservations: Reservations) -> None:
    """A running request adds 5,000 us over all tokens, a KV token 5."""
    await report(reservations, a=Load(20, 0, 0, 10_000), b=Load())
    slow = Limit(0, 0, 900_000.0)
    judged = await evaluate(reservations, slow, slow, decode_us=1_000_000.0)
    assert [one.over for one in judged.by_offer] == [Over.TPOT, 0]
    assert judged.by_offer[0].missed_us == 900_000 + 100_000 + 50_000 - 1_000_000


async def test_room_counts_before_the_slo() -> None:
    levels = [level(over, slo_filters=True) for over in (0, Over.TTFT, Over.TPOT, Over.SLOTS, Over.KV | Over.TTFT)]
    assert levels == [0, 1, 1, 2, 2]
    assert level(Over.TTFT | Over.TPOT, slo_filters=False) == 0
    assert (Over.TTFT | Over.KV).names == ("ttft", "kv")
