"""Time limits that only the other side can miss. A busy router may read an answer long after it arrived; a plain timeout would
then blame the engine and lose its request."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LAST_LOOKS = 20
"""Extra turns of the event loop, each of which reads what has arrived. Connecting takes several."""


async def wait_patiently(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """The call's result. If it is not done after this time and LAST_LOOKS turns, cancel it and raise TimeoutError."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait((task,), timeout=seconds)
        for _ in range(LAST_LOOKS):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
