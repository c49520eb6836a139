"""Deadlines of store calls: how long a decision waits for the store, and what happens to late calls."""

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
"""Share of a decision's time that reading the pool and the index may take, so that some time remains for booking."""

STORE_FAILURES = (Unreachable, LayoutMismatch, RedisError, TimeoutError)
"""Errors from a store that is slow, down, or back without its data."""


class StoreLatency:
    """How long the store's answers take, smoothed as TCP smooths its round trips (RFC 6298, 2). Waiting for the event loop is
    included: on a busy machine the store answers just as fast, but its answers are read later."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._known = False

    def record(self, seconds: float) -> None:
        """Record the duration of an answered call."""
        if not self._known:
            self._mean_s, self._deviation_s, self._known = seconds, seconds / 2, True
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8

    def deadline_ms(self, least_ms: float, most_ms: float, calls: int = CALLS_A_DECISION) -> float:
        """Time for a decision that waits for this many calls. A store that never answers does not lengthen it."""
        enough_ms = calls * (self._mean_s + 4 * self._deviation_s) * 1_000
        return min(max(least_ms, enough_ms), max(least_ms, most_ms))


class LateCalls:
    """Store calls past their deadline. They run to their end, so that a connection that is just being opened can serve the
    next call instead of being cancelled every time. The store's own timeout ends them."""

    def __init__(self) -> None:
        self.latency = StoreLatency()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._late: set[asyncio.Task[Any]] = set()

    async def wait_for(self, call: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the call's result. Raises TimeoutError if it takes longer, and what the call raises."""
        if (loop := self._loop) is None:  # finding it costs Python 3.11 a system call
            loop = self._loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        task = loop.create_task(self._measure(call, waiter))
        timer = loop.call_later(max(0.0, seconds), _end, waiter)
        try:
            await waiter
            for _ in range(LAST_CHECKS):  # if this process was the busy one, the result has arrived by now
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
            # its error's traceback has this frame: a cycle, which would keep the callers' requests for a while
            del task

    def run_behind(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that nothing waits for. It handles what the store raises."""
        self._keep(asyncio.create_task(call))

    async def close(self) -> None:
        """Cancel the calls that are still running."""
        await end_tasks(list(self._late))

    async def _measure(self, call: Coroutine[Any, Any, T], waiter: "asyncio.Future[None]") -> T:
        """The call's result; `waiter` wakes up once this task is done."""
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
    """The time that one decision may wait for the store; None: no limit.

    The router's own computing in between does not count. With a thousand workers it may take longer than the limit, and falling
    open would not shorten it.
    """

    def __init__(self, ms: float | None, late_calls: LateCalls, clock: Callable[[], float] = time.monotonic) -> None:
        self.ms = ms
        self._late_calls = late_calls
        self._clock = clock
        self._waited_s = 0.0

    async def wait_for(self, call: Coroutine[Any, Any, T], share: float = 1.0) -> T:
        """Return the call's result. Raises TimeoutError after this share of the time, and what the call raises."""
        if self.ms is None:
            return await call
        began = self._clock()
        try:
            return await self._late_calls.wait_for(call, self.ms * share / 1_000 - self._waited_s)
        finally:
            self._waited_s += self._clock() - began

    def run_behind(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that this decision does not wait for. It handles what the store raises."""
        self._late_calls.run_behind(call)

    def share_s(self, share: float) -> float | None:
        """This share of the time, in seconds; None: no limit."""
        return None if self.ms is None else self.ms * share / 1_000

    def describe(self, error: BaseException) -> str:
        """The reason why a call failed, in one line."""
        return f"no answer in {self.ms:g} ms" if isinstance(error, TimeoutError) else str(error)
