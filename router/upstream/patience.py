"""Time limits that only the other side can miss. A busy process reads late what is there: an engine would be blamed, and its
request lost, for what the router did not look at."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LAST_LOOKS = 20
"""Turns of the event loop, each of which reads what has arrived: a connection takes several."""


async def wait_patiently(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """The call's result. Raises TimeoutError if it is not there after this time, nor after LAST_LOOKS; the call is cancelled
    then."""
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
