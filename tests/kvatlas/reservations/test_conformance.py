"""The promises of every implementation of reservations about bookings: how they load workers, and when they end."""

import pytest

from kvatlas.cost import Load
from kvatlas.errors import InvalidValue
from kvatlas.reservations import Booking, LoadReport, Outcome, Reservations, WorkerReport
from kvatlas.reservations.protocol import ARRIVAL_US, STALE_US
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, ask, book, id_of, offer, steps

pytestmark = pytest.mark.anyio

TWO = ask([offer("a"), offer("b")])


async def load(reservations: Reservations, worker_id: str) -> Load:
    return (await reservations.evaluate(POOL, ask([offer(worker_id)]))).by_offer[0].load


async def report(
    reservations: Reservations, incarnation: int = 1, age_us: int | None = 0, **workers: Load | None
) -> None:
    reports = {
        id: WorkerReport(incarnation, None if load is None else LoadReport(load, age_us or 0, age_us is not None))
        for id, load in workers.items()
    }
    await reservations.report(POOL, reports)


# ---------------------------------------------------------------- load


async def test_bookings_of_all_routers_spread(reservations: Reservations) -> None:
    picked = [await book(reservations, number, TWO, router=f"r{number % 3}") for number in range(6)]
    assert picked == ["a", "b"] * 3
    assert await load(reservations, "a") == Load(3, 3_000, 0, 3_000)


async def test_a_prompt_that_waits_counts_with_its_own_tokens_though_a_sample_has_it(
    reservations: Reservations, clock: Clock
) -> None:
    only = ask([offer("a")])
    for number in range(4):
        await clock.pass_us(1)
        await book(reservations, number, only)
    await reservations.record_first_token(POOL, id_of(0))
    await clock.pass_us(ARRIVAL_US)
    sampled = Load(running_decodes=2, queued_prefill_tokens=60, kv_tokens=1_500)
    await reservations.report(POOL, {"a": WorkerReport(1, LoadReport(sampled, waiting=2))})
    # request 0 decodes, 1 has begun, 2 and 3 wait: their 1,000 tokens each are known, whatever the engine's mean prompt length
    assert await load(reservations, "a") == Load(4, 3_000, 0, 3_500)
    for number in (1, 2, 3):
        await reservations.record_first_token(POOL, id_of(number))
    assert await load(reservations, "a") == Load(4, 0, 0, 3_500)


async def test_what_waits_beside_the_bookings_counts_as_the_engine_reports_it(
    reservations: Reservations, clock: Clock
) -> None:
    await book(reservations, 1, ask([offer("a")]))
    await clock.pass_us(ARRIVAL_US)
    await reservations.report(POOL, {"a": WorkerReport(1, LoadReport(Load(3, 90, 0, 700), waiting=3))})
    assert await load(reservations, "a") == Load(4, 1_060, 0, 1_700)


async def test_a_booking_without_a_first_token_is_in_the_sample_once_a_newer_one_waits(
    reservations: Reservations, clock: Clock
) -> None:
    only = ask([offer("a")])
    await book(reservations, 1, only)
    await clock.pass_us(ARRIVAL_US)
    idle = {"a": WorkerReport(1, LoadReport(Load()))}
    busy = {"a": WorkerReport(1, LoadReport(Load(1, 0, 0, 1_000)))}
    await reservations.report(POOL, busy)
    assert await load(reservations, "a") == Load(1, 1_000, 0, 1_000)
    await clock.pass_us(1)
    await book(reservations, 2, only)
    await clock.pass_us(ARRIVAL_US)
    await reservations.report(POOL, busy)
    assert await load(reservations, "a") == Load(1, 1_000, 0, 1_000)
    await clock.pass_us(1)
    await reservations.report(POOL, idle)
    assert await load(reservations, "a") == Load()


async def test_evaluating_books_nothing(reservations: Reservations) -> None:
    await book(reservations, 1, TWO)
    first = await reservations.evaluate(POOL, TWO)
    assert (first.chosen, first) == (1, await reservations.evaluate(POOL, TWO))


async def test_a_reservation_queues_until_its_first_token_and_runs_until_its_end(reservations: Reservations) -> None:
    await book(reservations, 1, TWO)
    assert await reservations.record_first_token(POOL, id_of(1))
    assert await load(reservations, "a") == Load(1, 0, 0, 1_000)
    assert not await reservations.record_first_token(POOL, id_of(1))
    assert await reservations.release(POOL, id_of(1), Outcome.FINISHED)
    assert await load(reservations, "a") == Load()
    assert not await reservations.release(POOL, id_of(1), Outcome.FINISHED)
    assert not await reservations.record_first_token(POOL, id_of(1))
    assert await load(reservations, "a") == Load()


async def test_what_is_booked_is_found_until_it_is_released(reservations: Reservations) -> None:
    for number in range(3):
        await book(reservations, number, TWO)
    await reservations.release(POOL, id_of(1), Outcome.FAILED)
    ids = [id_of(number) for number in range(600)]
    assert await reservations.find_booked(POOL, ids) == {id_of(0), id_of(2)}
    assert await reservations.find_booked("another", ids) == await reservations.find_booked(POOL, []) == set()


async def test_reported_and_booked_load_add_up(reservations: Reservations) -> None:
    await report(reservations, a=Load(2, 500, 1, 9_000), b=Load())
    assert await book(reservations, 1, TWO) == "b"
    assert await book(reservations, 2, ask([offer("a")])) == "a"
    assert await load(reservations, "a") == Load(3, 1_500, 1, 10_000)


async def test_a_sample_includes_what_was_booked_before_it_and_nothing_counts_twice(
    reservations: Reservations, clock: Clock
) -> None:
    await book(reservations, 1, ask([offer("a")]))
    await clock.pass_us(ARRIVAL_US)
    await book(reservations, 2, ask([offer("a")]))
    await report(reservations, a=Load(1, 700, 0, 1_000))
    assert await load(reservations, "a") == Load(2, 1_700, 0, 2_000)
    await reservations.release(POOL, id_of(1), Outcome.FINISHED)  # it is in the sample: nothing to take away
    assert await load(reservations, "a") == Load(2, 1_700, 0, 2_000)
    await reservations.release(POOL, id_of(2), Outcome.FINISHED)
    assert await load(reservations, "a") == Load(1, 700, 0, 1_000)


async def test_a_sample_of_unknown_time_includes_no_booking(reservations: Reservations, clock: Clock) -> None:
    await book(reservations, 1, ask([offer("a")]))
    await clock.pass_us(SECOND_US)
    await report(reservations, age_us=None, a=Load(1, 0, 0, 0))
    assert await load(reservations, "a") == Load(2, 1_000, 0, 1_000)


async def test_an_older_sample_is_ignored(reservations: Reservations) -> None:
    await report(reservations, a=Load(1))
    await report(reservations, age_us=1, a=Load(9))
    assert await load(reservations, "a") == Load(1)


async def test_a_stale_load_is_unknown_not_zero(reservations: Reservations, clock: Clock) -> None:
    await report(reservations, a=Load())
    await clock.pass_us(STALE_US - 1)
    await report(reservations, b=Load(3, 2_000, 0, 0))
    assert [one.load_known for one in (await reservations.evaluate(POOL, TWO)).by_offer] == [True, True]
    await clock.pass_us(1)
    found = await reservations.evaluate(POOL, TWO)
    assert [one.load_known for one in found.by_offer] == [False, True]
    assert found.by_offer[0].load == Load(3, 2_000, 0, 0)
    await book(reservations, 1, TWO)
    assert await book(reservations, 2, TWO) == "b"  # what was booked on the unknown one counts


async def test_an_unknown_load_is_the_mean_also_of_a_worker_that_is_much_too_dear(reservations: Reservations) -> None:
    await report(reservations, a=Load(3, 2_000, 0, 0), b=None)
    found = await reservations.evaluate(POOL, ask([offer("b", extra_us=1e9), offer("a")]))
    assert (found.chosen, found.by_offer[0].load, found.by_offer[0].load_known) == (1, Load(3, 2_000, 0, 0), False)


async def test_ties_go_to_the_first_offer(reservations: Reservations) -> None:
    assert (await reservations.evaluate(POOL, ask([offer("z"), offer("a")]))).chosen == 0


# ---------------------------------------------------------------- ends


async def test_reservations_end_with_their_routers_lease(reservations: Reservations, clock: Clock) -> None:
    await book(reservations, 1, ask([offer("a")]), router="dead")
    await clock.pass_us(LEASE_US - 1)
    assert await reservations.renew_lease(POOL, "alive", LEASE_US) is False  # its first
    await book(reservations, 2, ask([offer("a")]), router="alive")
    assert await load(reservations, "a") == Load(2, 2_000, 0, 2_000)
    await clock.pass_us(1)
    assert await reservations.renew_lease(POOL, "alive", LEASE_US) is True
    assert await load(reservations, "a") == Load(1, 1_000, 0, 1_000)
    assert await reservations.renew_lease(POOL, "dead", LEASE_US) is False


async def test_ending_a_lease_ends_its_reservations(reservations: Reservations) -> None:
    await book(reservations, 1, ask([offer("a")]), router="r1")
    await book(reservations, 2, ask([offer("a")]), router="r2")
    await reservations.end_lease(POOL, "r1")
    assert await load(reservations, "a") == Load(1, 1_000, 0, 1_000)


async def test_a_reservation_that_is_never_released_ends(reservations: Reservations, clock: Clock) -> None:
    await book(reservations, 1, ask([offer("a")]))
    for _ in range(LONGEST_US // (4 * SECOND_US)):
        await clock.pass_us(4 * SECOND_US)
        await reservations.renew_lease(POOL, "r", LEASE_US)
    assert await load(reservations, "a") == Load()


async def test_a_clock_that_goes_back_does_not_freeze_loads(reservations: Reservations, clock: Clock) -> None:
    """Like the clock of a replica on another machine that has become the primary."""
    await report(reservations, a=Load(9, 9_000, 0, 0), b=Load())
    assert await book(reservations, 1, TWO) == "b"
    await clock.pass_us(-3_600 * SECOND_US)
    await report(reservations, a=Load(1, 20, 0, 0))
    await report(reservations, b=Load(1, 9_000, 0, 0))
    found = (await reservations.evaluate(POOL, TWO)).by_offer
    assert [(one.load, one.load_known) for one in found] == [(Load(1, 20, 0, 0), True), (Load(1, 9_000, 0, 0), True)]
    assert await book(reservations, 2, TWO) == "a"
    assert await load(reservations, "a") == Load(2, 1_020, 0, 1_000)


async def test_bookings_outlive_their_workers_incarnation_and_settled_predictions_do_not(
    reservations: Reservations,
) -> None:
    settled, computing = steps(*range(4)), steps(*range(10, 14))
    await report(reservations, incarnation=5, a=None)
    await book(reservations, 1, ask([offer("a", chain=0)], settled))
    await reservations.record_first_token(POOL, id_of(1))
    await book(reservations, 2, ask([offer("a", chain=0)], computing))
    for incarnation in (5, 1 << 60):
        await report(reservations, incarnation=incarnation, a=None)
        assert await load(reservations, "a") == Load(2, 1_000, 0, 2_000)
    for chain, predicted in ((settled, False), (computing, True)):
        found = await reservations.evaluate(POOL, ask([offer("a", chain=0)], chain, 0.0))
        assert bool(found.by_offer[0].predicted_tokens) is predicted
    assert await reservations.release(POOL, id_of(1), Outcome.FINISHED)


@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.FAILED, Outcome.BROKEN])
async def test_what_an_engine_computed_before_it_failed_is_believed_no_longer(
    reservations: Reservations, outcome: Outcome
) -> None:
    """A client that disconnected changes nothing: the prompt was computed."""
    chain = steps(*range(4))
    await report(reservations, a=Load())
    await book(reservations, 1, ask([offer("a", chain=0)], chain))
    await reservations.record_first_token(POOL, id_of(1))
    await reservations.release(POOL, id_of(1), outcome)
    found = await reservations.evaluate(POOL, ask([offer("a", chain=0)], chain, 0.0))
    assert bool(found.by_offer[0].predicted_tokens) is (outcome is not Outcome.BROKEN)


async def test_a_report_of_a_lower_incarnation_changes_nothing(reservations: Reservations) -> None:
    chain = steps(*range(4))
    newer = 10_000_000_000_000_000_001  # as a double, equal to the one before
    await report(reservations, incarnation=newer, a=Load(3))
    await book(reservations, 1, ask([offer("a", chain=0)], chain))
    for lower in (newer - 1, 9_999_999_999_999_999_999):
        await report(reservations, incarnation=lower, age_us=None, a=Load(9))
        found = (await reservations.evaluate(POOL, ask([offer("a", chain=0)], chain, 0.0))).by_offer[0]
        assert found.load == Load(4, 1_000, 0, 1_000) and found.predicted_tokens


async def test_a_forgotten_worker_has_nothing(reservations: Reservations) -> None:
    await report(reservations, a=Load(7))
    await book(reservations, 1, ask([offer("a", chain=0)], steps(1, 2)))
    await reservations.forget(POOL, "a")
    found = (await reservations.evaluate(POOL, ask([offer("a", chain=0)], steps(1, 2)))).by_offer[0]
    assert (found.load, found.load_known, found.predicted_tokens) == (Load(), False, 0)


async def test_a_booking_that_was_called_off_is_refused_when_it_comes_late(
    reservations: Reservations, clock: Clock
) -> None:
    assert not await reservations.release(POOL, id_of(1), Outcome.CALLED_OFF)
    assert await book(reservations, 1, TWO) is None
    assert await load(reservations, "a") == Load()
    await book(reservations, 2, TWO)
    assert await reservations.release(POOL, id_of(2), Outcome.CALLED_OFF)
    assert await load(reservations, "a") == Load()
    await clock.pass_us(60 * SECOND_US)
    assert await book(reservations, 1, TWO) == "a"


async def test_a_booking_sent_again_counts_once(reservations: Reservations) -> None:
    for _ in range(3):
        await book(reservations, 1, ask([offer("a", chain=0)], steps(1, 2)))
    assert await load(reservations, "a") == Load(1, 1_000, 0, 1_000)


def test_a_booking_without_an_offer_or_with_a_wrong_id_is_refused() -> None:
    with pytest.raises(InvalidValue, match="without offers"):
        Booking(id_of(1), "r", 1, ask([]), LEASE_US, LONGEST_US)
    with pytest.raises(InvalidValue, match="3 bytes"):
        Booking(b"abc", "r", 1, TWO, LEASE_US, LONGEST_US)
