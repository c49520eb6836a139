"""In-process bookings cost the same however many are open, because routers make them when the store is away."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvatlas.cost import Load
from kvatlas.reservations import Booking, LoadReport, MemoryReservations, Outcome, WorkerReport
from kvatlas.reservations.due_heap import Deadlines
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, START_US, ask, id_of, offer, steps


def lines_run(call: Callable[[], object]) -> int:
    """Number of lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def with_open(bookings: int) -> MemoryReservations:
    """Many requests on two workers, each with its own prompt."""
    reservations = MemoryReservations(lambda: START_US)
    reservations.report_now(POOL, {id: WorkerReport(1, LoadReport(Load())) for id in ("a", "b")})
    for number in range(bookings):
        book(reservations, number)
    return reservations


def book(reservations: MemoryReservations, number: int) -> None:
    asked = ask([offer(id, chain=0) for id in ("a", "b")], steps(10_000 + number, 7))
    booking = Booking(id_of(number), "r", 1_000, asked, LEASE_US, LONGEST_US)
    assert reservations.book_now(POOL, booking) is not None


def test_a_booking_costs_no_more_with_3000_open_ones() -> None:
    few, many = with_open(50), with_open(3_000)
    for call in (
        lambda of: book(of, 5_000),
        lambda of: of.release_now(POOL, id_of(5_000), Outcome.FINISHED),
        lambda of: of.release_now(POOL, id_of(7), Outcome.FAILED),
        lambda of: of.report_now(POOL, {"a": WorkerReport(1, LoadReport(Load(), 0, covers=False))}),
    ):
        cost_few, cost_many = (lines_run(lambda of=of, call=call: call(of)) for of in (few, many))  # type: ignore[misc]
        assert cost_many < cost_few + 50


def test_deadlines_keep_nothing_of_what_was_discarded() -> None:
    deadlines = Deadlines[bytes]()
    for number in range(10_000):
        deadlines.add(START_US + number * SECOND_US, id_of(number))
        if number >= 10:
            deadlines.discard(id_of(number - 10))
    assert len(deadlines._heap) < 200
    assert deadlines.take_due(START_US + 9_994 * SECOND_US) == [id_of(number) for number in range(9_990, 9_995)]
    deadlines.add(START_US, id_of(9_999))
    assert deadlines.take_due(START_US) == [id_of(9_999)]
    assert id_of(9_999) not in deadlines and id_of(9_998) in deadlines
