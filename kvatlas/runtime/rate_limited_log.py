"""One clear log line for each kind of trouble, not one for each of a thousand bad messages."""

import logging
from collections.abc import Callable
from time import monotonic

QUIET_S = 10.0
MAX_KINDS = 64


class RateLimitedLog:
    """Logs the first line of a kind at once, then at most one in QUIET_S, with how many were left out."""

    def __init__(self, logger: logging.Logger, prefix: str = "", clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._prefix = prefix
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """By kind: when the last line was logged, and how many were left out since."""

    def report(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        now_s = self._clock()
        logged_s, left_out = self._logged.get(kind, (-QUIET_S, 0))
        if now_s - logged_s < QUIET_S:
            self._logged[kind] = (logged_s, left_out + 1)
            return
        if len(self._logged) >= MAX_KINDS:
            self._logged.clear()
        self._logged[kind] = (now_s, 0)
        more = f" ({left_out} similar lines left out)" if left_out else ""
        self._logger.log(level, "%s%s%s", self._prefix, line, more)
