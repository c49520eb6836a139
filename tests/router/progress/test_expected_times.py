"""How long an engine may be silent, given how long its pool's answers took."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.progress.expected_times import (
    ENOUGH,
    LEAST_SUSPECT_S,
    MEMORY,
    MOST_QUIET_S,
    UNKNOWN_S,
    ExpectedTimes,
)

SECONDS = st.floats(0.05, 100)


@given(SECONDS)
def test_nothing_is_known_before_enough_answers(predicted_s: float) -> None:
    times = ExpectedTimes()
    for _ in range(ENOUGH - 1):
        times.add("streamed", predicted_s, 0.1)
    bounds = times.bounds("streamed", predicted_s, 0.0)
    assert bounds.stall_s >= max(UNKNOWN_S, 3 * predicted_s) and bounds.suspect_s == bounds.stall_s / 2


@given(SECONDS, st.floats(0.2, 20), st.lists(st.floats(0.8, 1.25), min_size=MEMORY, max_size=MEMORY))
def test_a_stall_is_found_within_three_times_the_expected_time(
    predicted_s: float, speed: float, spread: list[float]
) -> None:
    times = ExpectedTimes()
    for one in spread:
        times.add("streamed", predicted_s, predicted_s * speed * one)
    bounds = times.bounds("streamed", predicted_s, 0.0)
    expected_s = predicted_s * speed
    assert expected_s * 0.79 <= bounds.suspect_s or bounds.suspect_s == LEAST_SUSPECT_S
    assert bounds.suspect_s < bounds.stall_s <= max(2 * LEAST_SUSPECT_S, 3 * expected_s * 1.26)


def test_wider_spread_gives_more_time() -> None:
    tight, wide = ExpectedTimes(), ExpectedTimes()
    for number in range(MEMORY):
        tight.add("streamed", 10.0, 10.0)
        wide.add("streamed", 10.0, 10.0 * (1.5 if number % 2 else 1 / 1.5))
    assert wide.bounds("streamed", 10.0, 0.0).stall_s > 1.3 * tight.bounds("streamed", 10.0, 0.0).stall_s


def test_kinds_of_requests_are_learned_apart() -> None:
    times = ExpectedTimes()
    for _ in range(MEMORY):
        times.add("streamed", 1.0, 1.0)
        times.add("whole", 1.0, 50.0)
    assert times.bounds("whole", 1.0, 0.0).suspect_s > 40 > times.bounds("streamed", 1.0, 0.0).stall_s


def test_a_silence_that_ended_well_is_allowed_again_for_a_while() -> None:
    times = ExpectedTimes()
    for _ in range(MEMORY):
        times.add("streamed", 0.1, 0.1)
    usual_s = times.bounds("streamed", 0.1, 0.0).stall_s
    times.add_silence(6.0, 0.0)
    times.add_silence(MOST_QUIET_S + 1, 0.0)  # the end of a stall, which is no measure of health
    assert times.bounds("streamed", 0.1, 1.0).stall_s > 8.0
    assert times.bounds("streamed", 0.1, 1e6).stall_s == usual_s


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(0, inf)), st.floats(0, 1e6)), max_size=100))
def test_bounds_are_finite_and_in_order_whatever_is_measured(answers: list[tuple[float | None, float]]) -> None:
    times = ExpectedTimes()
    for predicted_s, measured_s in answers:
        times.add("streamed", predicted_s, measured_s)
    bounds = times.bounds("streamed", 1.0, 0.0)
    assert LEAST_SUSPECT_S <= bounds.suspect_s < bounds.stall_s < inf
