"""One clear log line for each kind of trouble, instead of one for each of a thousand bad messages, or one every second."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic

QUIET_S = 10.0
LONGEST_QUIET_S = 600.0
MAX_KINDS = 64
LIMITED = "limited"
"""An attribute of log records that need no further limit."""


@dataclass(slots=True)
class _Kind:
    """One kind of trouble: when its last line was logged, how long it stays quiet now, how many lines have been dropped since
    then, and when the last one was logged or dropped."""

    logged_s: float
    quiet_s: float
    left_out: int
    seen_s: float


class Repetitions:
    """Admits the first line of a kind immediately, the next one after QUIET_S, then after twice that, and so on up to
    LONGEST_QUIET_S. A kind that has not been seen for that long starts over. Pure."""

    def __init__(self, most_kinds: int = MAX_KINDS) -> None:
        self._most_kinds = most_kinds
        self._kinds: dict[Hashable, _Kind] = {}

    def admit(self, kind: Hashable, now_s: float) -> int | None:
        """The number of lines that were left out before this one. None: leave this one out too."""
        known = self._kinds.get(kind)
        if known is not None and now_s - known.logged_s < known.quiet_s:
            known.left_out += 1
            known.seen_s = now_s
            return None
        goes_on = known is not None and now_s - known.seen_s < known.quiet_s
        quiet_s = min(2 * known.quiet_s, LONGEST_QUIET_S) if known is not None and goes_on else QUIET_S
        if known is None and len(self._kinds) >= self._most_kinds:
            self._kinds.clear()
        self._kinds[kind] = _Kind(now_s, quiet_s, 0, now_s)
        return known.left_out if known is not None else 0


class RateLimitedLog:
    """Logs lines when `Repetitions` admits their kind, together with the number of lines that were left out."""

    def __init__(self, logger: logging.Logger, prefix: str = "", clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._prefix = prefix
        self._clock = clock
        self._repetitions = Repetitions()

    def report(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        left_out = self._repetitions.admit(kind, self._clock())
        if left_out is not None:
            more = f" ({left_out} similar lines left out)" if left_out else ""
            self._logger.log(level, "%s%s%s", self._prefix, line, more, extra={LIMITED: True})
