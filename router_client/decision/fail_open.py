"""Falling open: deciding without the store where it is slow or away, and asking it again by itself."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, TypeVar

from redis.exceptions import RedisError

from kvatlas.errors import LayoutMismatch, Unreachable

T = TypeVar("T")

FAILURES = 3
REST_S = 0.25
LAST_LOOKS = 3

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


class Patience:
    """Waits for answers only so long, but lets those that are late come to their end: a connection that is just being
    made, and would be given up every time, is there for the next question. The store's own time limit ends them."""

    def __init__(self) -> None:
        self._late: set[asyncio.Task[Any]] = set()

    async def wait(self, answer: Coroutine[Any, Any, T], seconds: float) -> T:
        """The answer. Raises TimeoutError where it does not come in time, and what the answer raises."""
        task = asyncio.create_task(answer)
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await asyncio.shield(task)
        except TimeoutError:
            # where it was this process that was busy, the answer is there by now
            for _ in range(LAST_LOOKS):
                if task.done():
                    return task.result()
                await asyncio.sleep(0)
            raise
        finally:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Give up what is still on its way."""
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: nobody waits for it any more


class Deadline:
    """So many milliseconds of waiting; None: no end. What the router computes in between does not count: with a thousand
    workers it may be more, and falling open would not save it."""

    def __init__(self, ms: float | None, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self.ms = ms
        self._patience = patience
        self._clock = clock
        self._waited_s = 0.0

    async def keep(self, answer: Coroutine[Any, Any, T], share: float = 1.0) -> T:
        """The answer. Raises TimeoutError where it does not come in this share of the time."""
        if self.ms is None:
            return await answer
        began = self._clock()
        try:
            return await self._patience.wait(answer, self.ms * share / 1_000 - self._waited_s)
        finally:
            self._waited_s += self._clock() - began

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
