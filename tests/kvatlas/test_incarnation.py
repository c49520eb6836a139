import random

import pytest

from kvatlas.errors import InvalidValue
from kvatlas.incarnation import MAX_LEAD_MS, RANDOM_BITS, check_incarnation
from kvatlas_publishers.stream.incarnation import next_incarnation

NOW_US = 1_790_000_000_000_000


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
