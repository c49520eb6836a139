"""A wait that is ended by a call or by a timeout."""

import asyncio


class Wakeup:
    """One waiter, and any number of callers of `wake`, on the waiter's event loop. If nothing is waiting when it is called, the
    next wait ends immediately.

    A publisher waits a few times per message, so this uses a future and a timer: a cancel scope costs ten times as much.
    """

    __slots__ = ("_waiter", "_woken")

    def __init__(self) -> None:
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self._woken = True
        _end(self._waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Returns True when woken, or False after `timeout_s` (None: no limit)."""
        if not self._woken:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _end, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        woken, self._woken = self._woken, False
        return woken


def _end(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
