"""A circuit breaker: a store that keeps failing is only called now and then."""

import time
from collections.abc import Callable

FAILURES = 3
REST_S = 0.25


class CircuitBreaker:
    """Stops calls to a store that has failed `failures` times in a row; one call every `rest_s` seconds then tries the store
    again."""

    def __init__(
        self, failures: int = FAILURES, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failed = 0
        self._next_attempt = 0.0

    @property
    def is_open(self) -> bool:
        """True if the store has failed so often that calls are suspended. A call that `may_call` then allows is only a trial,
        which nothing should wait for."""
        return self._failed >= self._failures

    def may_call(self) -> bool:
        """True if the store may be called, perhaps with the one call that tries it again. Follow the call with `record_success`
        or `record_failure`."""
        if not self.is_open:
            return True
        now = self._clock()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._rest_s
        return True

    def record_success(self) -> None:
        """Record that the store answered."""
        self._failed = 0

    def record_failure(self) -> None:
        """Record that the store did not answer."""
        self._failed += 1
        if self.is_open:
            self._next_attempt = self._clock() + self._rest_s
