"""One asyncio task that starts and stops with the object that owns it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTask:
    """A task that may be started and stopped any number of times. Its body loops `while task.running`.

    The flag is needed because Python 3.11's `wait_for`, inside redis-py, may swallow a cancellation.
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
        """Cancel the body and wait for its end. Returns False if it was not started. What the body raised is dropped."""
        task, self._task = self._task, None
        self.running = False
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True
