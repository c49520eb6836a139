"""Incarnation numbers: one for each unbroken series of a worker's messages. They only ever grow.

    63                                             20 19                 0
    milliseconds since 1970, or one above the others | random

A new incarnation is above the publisher's last, saved and requested ones, so that the index accepts it. It is derived from the
clock, so a publisher that lost its state directory still goes above its own earlier incarnations. Because the low bits are
random, two publishers that both go above the same number practically never use the same incarnation.

Incarnations that are too far ahead of the clock are ignored. Otherwise, a single message or heartbeat with the highest number
would silence its worker forever, because no publisher could go above it. Within the limit, a higher number always exists: the
next one is a millisecond above, and clocks move on. The limit is wide, so that publishers with wrong clocks are heard; it only
needs to stay far below 64 bits.
"""

import random

from kvatlas.bus.wire import MAX_INCARNATION
from kvatlas.errors import InvalidValue

RANDOM_BITS = 20
MAX_LEAD_MS = 365 * 86_400 * 1_000


def check_incarnation(incarnation: int, now_us: int) -> int:
    """Return the incarnation. Raises InvalidValue if it is further ahead of the clock than any publisher's incarnation can
    be."""
    lead_ms = (incarnation >> RANDOM_BITS) - now_us // 1_000
    if lead_ms > MAX_LEAD_MS:
        days = lead_ms // 86_400_000
        raise InvalidValue(f"incarnation {incarnation} is {days} days ahead of this clock; expected at most 365")
    return incarnation


def next_incarnation(*, last: int = 0, saved: int = 0, requested: int = 0, now_us: int, rng: random.Random) -> int:
    """An incarnation above `last`, `saved` and `requested` (0: none), and above the clock.

    Raises InvalidValue if one of them is so high that no higher 64-bit number is left.
    """
    highest = max(last, saved, requested)
    base = max(highest >> RANDOM_BITS, now_us // 1000) + 1
    incarnation = base << RANDOM_BITS | rng.getrandbits(RANDOM_BITS)
    if incarnation > MAX_INCARNATION:
        raise InvalidValue(f"incarnation {highest}; no 64-bit number is left above it")
    return incarnation
