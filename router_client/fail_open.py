"""Falling open: deciding without the store where it is slow or away, and asking it again by itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from redis.exceptions import RedisError

from kvatlas.errors import LayoutMismatch, Unreachable

T = TypeVar("T")

FAILURES = 3
REST_S = 0.25

FAILING = (Unreachable, LayoutMismatch, RedisError, TimeoutError)
"""What a store raises that is slow, away, or just back without what it knew."""


class Basis(StrEnum):
    """What a choice was made by.

    `COST`: overlap, cost and load. `LOAD`: load alone, because the index did not answer or was not to be asked.
    `PREFIX_HASH`: a hash of the prompt's start, because load was not known either. `POLICY`: another policy, in shadow
    mode.
    """

    COST = "cost"
    LOAD = "load"
    PREFIX_HASH = "prefix_hash"
    POLICY = "policy"


class Deadline:
    """So many milliseconds from now; None: no end."""

    def __init__(self, ms: float | None) -> None:
        self.ms = ms
        self._began = time.monotonic()

    async def keep(self, answer: Awaitable[T], share: float = 1.0) -> T:
        """The answer. Raises TimeoutError where it does not come in this share of the time."""
        if self.ms is None:
            return await answer
        left_s = self._began + self.ms * share / 1_000 - time.monotonic()
        async with asyncio.timeout(max(0.0, left_s)):
            return await answer

    def why(self, error: BaseException) -> str:
        """One line."""
        return f"no answer in {self.ms:g} ms" if isinstance(error, TimeoutError) else str(error)


class Breaker:
    """Stops asking a store that failed `failures` times in a row; one question each `rest_s` tries it again."""

    def __init__(
        self, failures: int = FAILURES, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failed = 0
        self._next_try = 0.0

    def allows(self) -> bool:
        """May the store be asked now?"""
        if self._failed < self._failures:
            return True
        now = self._clock()
        if now < self._next_try:
            return False
        self._next_try = now + self._rest_s
        return True

    def succeeded(self) -> None:
        """The store answered."""
        self._failed = 0

    def failed(self) -> None:
        """It did not."""
        self._failed += 1
        if self._failed >= self._failures:
            self._next_try = self._clock() + self._rest_s
