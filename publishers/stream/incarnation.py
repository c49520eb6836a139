"""Incarnation numbers (`kvatlas.incarnation`): one for each unbroken series of a worker's messages; they only grow.

Above the publisher's last, the saved and the requested one, so that the index takes it. From the clock, so that a publisher
which lost its state directory is still above its former self. With random low bits, so that two publishers which both
go above the same number never use the same incarnation.
"""

import random

from kvatlas.bus.wire import MAX_INCARNATION
from kvatlas.errors import InvalidValue
from kvatlas.incarnation import RANDOM_BITS


def next_incarnation(*, last: int = 0, saved: int = 0, requested: int = 0, now_us: int, rng: random.Random) -> int:
    """An incarnation above `last`, `saved` and `requested` (0: there is none), and above those of the clock so far.

    Raises InvalidValue if one of them is so high that no number of 64 bits is left above it.
    """
    highest = max(last, saved, requested)
    base = max(highest >> RANDOM_BITS, now_us // 1000) + 1
    incarnation = base << RANDOM_BITS | rng.getrandbits(RANDOM_BITS)
    if incarnation > MAX_INCARNATION:
        raise InvalidValue(f"incarnation {highest}; no number of 64 bits is left above it")
    return incarnation
