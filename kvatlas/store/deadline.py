"""Deadlines for store calls: how long a decision waits for the store, and what happens to calls that are late."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from redis.exceptions import RedisError

from kvatlas.errors import LayoutMismatch, Unreachable
from kvatlas.runtime.background_task import end_tasks

T = TypeVar("T")

LAST_CHECKS = 3
CALLS_A_DECISION = 3
READ_SHARE = 0.6
"""The share of a decision's time that reading the pool and the index may take, so that some time is left for booking."""

STORE_FAILURES = (Unreachable, LayoutMismatch, RedisError, TimeoutError)
"""Errors of a store that is slow, down, or back without its data."""


class StoreLatency:
    """How long the store takes to answer, smoothed in the way that TCP smooths its round trips (RFC 6298, 2). The wait for the
    event loop is included: on a busy machine, the store answers just as fast, but its answers are read later."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._known = False

    def record(self, seconds: float) -> None:
        """Record how long an answered call took."""
        if not self._known:
            self._mean_s, self._deviation_s, self._known = seconds, seconds / 2, True
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8

    def deadline_ms(self, least_ms: float, most_ms: float, calls: int = CALLS_A_DECISION) -> float:
        """The time for a decision that waits for this many calls. A store that never answers does not lengthen it."""
        enough_ms = calls * (self._mean_s + 4 * self._deviation_s) * 1_000
        return min(max(least_ms, enough_ms), max(least_ms, most_ms))


class LateCalls:
    """Store calls that are past their deadline. They run to their end, so that a connection that is just being opened can serve
    the next call instead of being cancelled every time. The store's own timeout ends them."""

    def __init__(self) -> None:
        self.latency = StoreLatency()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._late: set[asyncio.Task[Any]] = set()

    async def wait_for(self, call: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result of the call. Raises TimeoutError if it takes longer than `seconds`, or whatever the call raises."""
        if (loop := self._loop) is None:  # finding the loop costs a system call in Python 3.11
            loop = self._loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        task = loop.create_task(self._measure(call, waiter))
        timer = loop.call_later(max(0.0, seconds), _end, waiter)
        try:
            await waiter
            for _ in range(LAST_CHECKS):  # if it was this process that was busy, the result has arrived by now
                if task.done():
                    break
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._keep(task)  # if it has just failed, too, its error is retrieved
            raise
        finally:
            timer.cancel()
        try:
            if not task.done():
                self._keep(task)
                raise TimeoutError
            return task.result()
        finally:
            # the traceback of its error refers to this frame, a cycle that would keep the callers' requests for a while
            del task

    def run_behind(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that nothing waits for. The call must handle what the store raises."""
        self._keep(asyncio.create_task(call))

    async def close(self) -> None:
        """Cancel the calls that are still running."""
        await end_tasks(list(self._late))

    async def _measure(self, call: Coroutine[Any, Any, T], waiter: "asyncio.Future[None]") -> T:
        """The result of the call; `waiter` wakes up once this task is done."""
        try:
            began = time.monotonic()
            answer = await call
            self.latency.record(time.monotonic() - began)
            return answer
        finally:
            _end(waiter)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._late.add(task)
        task.add_done_callback(self._discard)

    def _discard(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve the error; otherwise asyncio logs that it never was


def _end(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Deadline:
    """The time that one decision may wait for the store; None: there is no limit.

    The router's own computing in between does not count. With a thousand workers, it may take longer than the limit, and
    falling open would not make it shorter.
    """

    def __init__(self, ms: float | None, late_calls: LateCalls, clock: Callable[[], float] = time.monotonic) -> None:
        self.ms = ms
        self._late_calls = late_calls
        self._clock = clock
        self._waited_s = 0.0

    async def wait_for(self, call: Coroutine[Any, Any, T], share: float = 1.0) -> T:
        """Return the result of the call. Raises TimeoutError after this share of the time, or whatever the call raises."""
        if self.ms is None:
            return await call
        began = self._clock()
        try:
            return await self._late_calls.wait_for(call, self.ms * share / 1_000 - self._waited_s)
        finally:
            self._waited_s += self._clock() - began

    def run_behind(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that this decision does not wait for. The call must handle what the store raises."""
        self._late_calls.run_behind(call)

    def share_s(self, share: float) -> float | None:
        """This share of the time, in seconds; None: no limit."""
        return None if self.ms is None else self.ms * share / 1_000

    def describe(self, error: BaseException) -> str:
        """The reason why a call failed, as one line."""
        return f"no answer in {self.ms:g} ms" if isinstance(error, TimeoutError) else str(error)
