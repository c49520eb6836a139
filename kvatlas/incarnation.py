"""The number of an incarnation: one for each unbroken series of a worker's messages. They only grow.

    63                                             20 19                 0
    milliseconds since 1970, or one above the others | random

A new one is above the publisher's last, the saved and the requested one, so that the index takes it. It comes from the clock,
so that a publisher which lost its state directory is still above its former self. With random low bits, two publishers which
both go above the same number never use the same incarnation.

Without a limit one message or heartbeat with the highest number would silence its worker for ever: no publisher could go
above it. Within the limit there is always a number left: the next one is a millisecond above, and the clocks move on. The limit
is wide, so that a publisher whose clock is wrong is heard; all that it needs is to be far below 64 bits.
"""

import random

from kvatlas.bus.wire import MAX_INCARNATION
from kvatlas.errors import InvalidValue

RANDOM_BITS = 20
MAX_LEAD_MS = 365 * 86_400 * 1_000


def check_incarnation(incarnation: int, now_us: int) -> int:
    """Return the incarnation. Raises InvalidValue if it is further above the clock than any publisher's."""
    lead_ms = (incarnation >> RANDOM_BITS) - now_us // 1_000
    if lead_ms > MAX_LEAD_MS:
        days = lead_ms // 86_400_000
        raise InvalidValue(f"incarnation {incarnation} is {days} days ahead of this clock; expected at most 365")
    return incarnation


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
