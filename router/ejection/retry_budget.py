"""Limits retries, so that they don't make an overload worse, and so that one tenant's failing requests don't use up the
retries of others."""

import time
from collections import OrderedDict
from collections.abc import Callable

SHARE = 0.2
RESERVE = 20.0
LEAST_RESERVE = 2.0
FADE_S = 10.0
MOST_TENANTS = 1_000


class RetryBudgets:
    """One router's budgets for the tenants of one pool. Tenants share RESERVE equally, but each gets at least
    LEAST_RESERVE. Only the MOST_TENANTS most recent tenants are remembered."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[str | None, RetryBudget] = OrderedDict()

    def of(self, tenant_id: str | None) -> "RetryBudget":
        """A tenant's budget; None: there is only one tenant."""
        budget = self._budgets.get(tenant_id)
        if budget is None:
            budget = self._budgets[tenant_id] = RetryBudget()
            if len(self._budgets) > MOST_TENANTS:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(tenant_id)
        budget.reserve = max(LEAST_RESERVE, RESERVE / len(self._budgets))
        return budget


class RetryBudget:
    """One router's budget for a pool and tenant: at most SHARE of their first attempts, plus about `reserve` per FADE_S, which
    matters when there are few requests.

    Budgets add up just as first attempts do: together, R routers retry at most SHARE of the pool's requests, plus R times
    RESERVE. An attempt that reached no engine costs no engine anything, and is not counted.
    """

    def __init__(
        self, share: float = SHARE, reserve: float = RESERVE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self.reserve = reserve
        self._tokens = reserve
        self._clock = clock
        self._at = clock()
        self._earned = 0.0

    def record_request(self) -> None:
        """Record a request's first attempt."""
        self._refill()
        self._earned += self._share  # faded: a burst of failures may use what was earned in the last few seconds

    def take(self) -> bool:
        """Return true if one more attempt is allowed, and count it."""
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
        self._tokens = min(self.reserve, self._tokens + passed * self.reserve / FADE_S)
        self._earned *= 0.5 ** (passed / FADE_S)
