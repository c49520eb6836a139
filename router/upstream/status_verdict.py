"""Judges an engine's HTTP status: what it says about the request and the engine, and whether another engine should be
tried."""

from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

NOT_OURS = (501, 505)
"""Server errors that mean that the request is not supported."""
DOUBTFUL = (401, 403, 404, 405, 501)
"""Statuses that may be due to a mistake by the client, or to an engine with a different key, list of models or
version."""
ELSEWHERE = (408, 429)


class Verdict(Enum):
    """`ANSWERED`: the request is answered. `ELSEWHERE`: this engine can't answer it now, so another one is tried, since
    nothing has been sent to the client yet. `DOUBTFUL`: one other engine is asked; only if that one answers was this engine
    at fault. `REFUSED`: judging by this answer, the request is at fault; the client gets the refusal."""

    ANSWERED = "answered"
    ELSEWHERE = "elsewhere"
    DOUBTFUL = "doubtful"
    REFUSED = "refused"


def judge(status: int) -> Verdict:
    """The verdict on an answer, by its status."""
    if 200 <= status < 300:
        return Verdict.ANSWERED
    if status in DOUBTFUL:
        return Verdict.DOUBTFUL
    if status in ELSEWHERE or (status >= 500 and status not in NOT_OURS):
        return Verdict.ELSEWHERE
    return Verdict.REFUSED


def retry_after_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Seconds to wait according to the Retry-After header (RFC 9110, 10.2.3: seconds or a date); None if there is no
    valid one."""
    value = next((value.decode("latin-1").strip() for name, value in headers if name.lower() == b"retry-after"), None)
    if value is None:
        return None
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date - datetime.now(UTC)).total_seconds()) if date.tzinfo is not None else None
