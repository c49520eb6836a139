"""Limits retries, so that they don't make an overload worse."""

import time
from collections.abc import Callable

SHARE = 0.2
RESERVE = 20.0
FADE_S = 10.0


class RetryBudget:
    """The budget of one pool in one router: at most SHARE of its first attempts, plus about RESERVE in each FADE_S for pools
    with few requests.

    Budgets add up as first attempts do: R routers together retry at most SHARE of the pool's requests plus R times RESERVE. An
    attempt that reached no engine costs no engine anything, and is not counted.
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
        """Record a request's first attempt."""
        self._refill()
        self._earned += self._share  # fades: a burst of failures may use what the last seconds earned

    def take(self) -> bool:
        """True if one more attempt is allowed, which is then counted."""
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
