import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.bus.wire import MAX_INCARNATION
from kvatlas.errors import InvalidValue
from kvatlas.incarnation import MAX_LEAD_MS, RANDOM_BITS, check_incarnation, next_incarnation

NOW_US = 1_790_000_000_000_000
PLAUSIBLE = st.integers(0, MAX_INCARNATION >> 1)


@given(PLAUSIBLE, PLAUSIBLE, PLAUSIBLE, st.integers(0, NOW_US), st.randoms())
def test_an_incarnation_is_above_the_last_the_saved_the_requested_and_the_clock(
    last: int, saved: int, requested: int, now_us: int, rng: random.Random
) -> None:
    made = next_incarnation(last=last, saved=saved, requested=requested, now_us=now_us, rng=rng)
    assert max(last, saved, requested) < made <= MAX_INCARNATION
    assert made > next_incarnation(now_us=max(0, now_us - 1000), rng=rng) or now_us < 1000


def test_a_publisher_that_lost_its_state_is_above_its_former_self() -> None:
    former = next_incarnation(now_us=NOW_US, rng=random.Random(1))
    assert next_incarnation(now_us=NOW_US + 1000, rng=random.Random(2)) > former


def test_two_publishers_above_the_same_number_differ() -> None:
    made = {next_incarnation(requested=1 << 62, now_us=NOW_US, rng=random.Random(seed)) for seed in range(200)}
    assert len(made) == 200


def test_nothing_is_left_above_the_highest_number() -> None:
    with pytest.raises(InvalidValue, match=str(MAX_INCARNATION)):
        next_incarnation(requested=MAX_INCARNATION, now_us=NOW_US, rng=random.Random(1))


def test_the_highest_number_is_of_no_publisher() -> None:
    with pytest.raises(InvalidValue, match="days ahead of this clock; expected at most 365"):
        check_incarnation((1 << 64) - 1, NOW_US)


def test_above_the_highest_number_that_is_accepted_there_is_always_another_a_millisecond_later() -> None:
    highest = check_incarnation((NOW_US // 1_000 + MAX_LEAD_MS + 1 << RANDOM_BITS) - 1, NOW_US)
    later_us = NOW_US + 1_000
    assert (
        check_incarnation(next_incarnation(requested=highest, now_us=later_us, rng=random.Random(1)), later_us)
        > highest
    )
