"""The number of an incarnation, and how far above the clock it may be.

    63                                             20 19                 0
    milliseconds since 1970, or one above the others | random

Without a limit one message or heartbeat with the highest number would silence its worker for ever: no publisher could go
above it. Within the limit there is always a number left: the next one is a millisecond above, and the clocks move on. The limit
is wide, so that a publisher whose clock is wrong is heard; all that it needs is to be far below 64 bits.
"""

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
