"""One clear log line for each kind of trouble, not one for each of a thousand bad messages."""

import logging
from collections.abc import Callable
from time import monotonic

QUIET_S = 10.0
MOST_KINDS = 64


class Complaints:
    """Logs the first of a kind at once, then at most one in QUIET_S, with how many were left out."""

    def __init__(self, logger: logging.Logger, prefix: str = "", clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._prefix = prefix
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    def say(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        now_s = self._clock()
        at_s, unsaid = self._said.get(kind, (-QUIET_S, 0))
        if now_s - at_s < QUIET_S:
            self._said[kind] = (at_s, unsaid + 1)
            return
        if len(self._said) >= MOST_KINDS:
            self._said.clear()
        self._said[kind] = (now_s, 0)
        more = f" ({unsaid} more like it before)" if unsaid else ""
        self._logger.log(level, "%s%s%s", self._prefix, line, more)
