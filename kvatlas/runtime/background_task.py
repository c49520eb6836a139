"""An asyncio task that starts and stops with the object that owns it, and functions that wait for any tasks or end them.

Python 3.11's `wait_for`, which redis-py and nats-py use, swallows a cancellation that arrives together with its result. A task
may therefore have to be cancelled more than once. anyio's task groups do that; asyncio's own tasks are ended with `end_tasks`.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

AGAIN_S = 5.0
"""If a cancelled task is still running after this long, it is cancelled again. Longer than any task needs to clean up."""


async def end_tasks(tasks: Collection[asyncio.Future[Any]], *, again_s: float = AGAIN_S) -> None:
    """Cancel the tasks and wait until all of them have ended; their errors are dropped. A task that swallowed the cancellation
    is cancelled again every `again_s`, which must be longer than the tasks need to clean up."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieve it, so that asyncio does not log it


async def wait_for_first(tasks: Collection[asyncio.Future[Any]], seconds: float | None) -> None:
    """Wait for at most this long until one of the tasks is done. There must be at least one task. Like `asyncio.wait`, but
    takes a third of the time."""
    loop = next(iter(tasks)).get_loop()  # finding the running loop costs a system call in Python 3.11
    waiter = loop.create_future()

    def wake(*_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if seconds is None else loop.call_later(seconds, wake)
    for task in tasks:
        task.add_done_callback(wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for task in tasks:
            task.remove_done_callback(wake)


class BackgroundTask:
    """A task that may be started and stopped any number of times. Its body loops `while task.running`, so that it ends even if
    it swallows a cancellation."""

    def __init__(self, body: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._body = body
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self.running = False
        """True from `start` until `stop` is called."""

    def start(self) -> None:
        """Run the body in the current event loop."""
        self.running = True
        self._task = asyncio.create_task(self._body(), name=self._name)

    async def stop(self) -> bool:
        """Cancel the body and wait until it has ended. Returns False if it was not started. Errors of the body are dropped."""
        task, self._task = self._task, None
        self.running = False
        if task is None:
            return False
        await end_tasks([task], again_s=AGAIN_S)
        return True
