"""One asyncio task that starts and stops with the object that owns it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

AGAIN_S = 5.0
"""If a cancelled task still runs after this long, it is cancelled again. Longer than any body needs to clean up."""


class BackgroundTask:
    """A task that may be started and stopped any number of times. Its body loops `while task.running`.

    Python 3.11's `wait_for`, used in redis-py and nats-py, may swallow a cancellation. A body that loops sees the flag; one
    that waits for something else by then is cancelled again after AGAIN_S.
    """

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
        """Cancel the body and wait for its end. Returns False if it was not started. Errors of the body are dropped."""
        task, self._task = self._task, None
        self.running = False
        if task is None:
            return False
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=AGAIN_S)
        await asyncio.gather(task, return_exceptions=True)
        return True
