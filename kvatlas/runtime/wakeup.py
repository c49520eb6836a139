"""A wait that is ended by a call or by time."""

import anyio


class Wakeup:
    """One waiter; any number of callers of `wake`, on the waiter's event loop. A call without a waiter ends the next wait at
    once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when woken, False after `timeout_s` (None: no limit)."""
        if not self._event.is_set():
            if timeout_s is None:
                await self._event.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await self._event.wait()
        woken = self._event.is_set()
        if woken:
            self._event = anyio.Event()
        return woken
