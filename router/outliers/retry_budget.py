"""How many requests may be tried again, so that a bad day is not made worse by retries."""

import time
from collections.abc import Callable

SHARE = 0.2
RESERVE = 20.0
FADE_S = 10.0


class RetryBudget:
    """Of one pool in one router: retries are at most SHARE of its first tries, and RESERVE more in each FADE_S or so for pools
    with few requests.

    As the first tries of all routers add up to the pool's, so do their budgets: R routers together retry at most SHARE of the
    pool's requests and R times RESERVE. A try that reached no engine costs no engine
    anything, and is not counted.
    """

    def __init__(
        self, share: float = SHARE, reserve: float = RESERVE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._most = reserve
        self._tokens = reserve
        self._clock = clock
        self._at = clock()
        self._earned = 0.0

    def record_request(self) -> None:
        """A request is tried for the first time."""
        self._refill()
        self._earned += self._share  # fades: a burst of failures may use what the last seconds earned

    def take(self) -> bool:
        """True if one more try is allowed; it is counted then."""
        self._refill()
        if self._earned >= 1.0:
            self._earned -= 1.0
        elif self._tokens >= 1.0:
            self._tokens -= 1.0
        else:
            return False
        return True

    def _refill(self) -> None:
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), now
        self._tokens = min(self._most, self._tokens + passed * self._most / FADE_S)
        self._earned *= 0.5 ** (passed / FADE_S)
