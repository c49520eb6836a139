"""Time limits that can be missed only by the other side. A busy router may read an answer long after it arrived; a plain
timeout would then blame the engine and lose the request."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvatlas.runtime.background_task import end_tasks

T = TypeVar("T")

LAST_LOOKS = 20
"""Number of extra turns of the event loop, each of which reads whatever has arrived. Connecting takes several turns."""


async def wait_patiently(
    call: Coroutine[Any, Any, T], seconds: float, discard: Callable[[T], object] = lambda _: None
) -> T:
    """The call's result. If it is not done after this time and LAST_LOOKS turns, cancel it and raise TimeoutError. `discard`:
    receives a result that arrives too late, or just as the caller is cancelled."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait((task,), timeout=seconds)
        for _ in range(LAST_LOOKS):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        raise TimeoutError
    except BaseException:
        task.add_done_callback(partial(_discard, discard))
        if not task.done():
            await end_tasks([task])
        raise
    finally:
        del task  # its error's traceback holds this frame: a cycle, which would keep the callers' requests for a while


def _discard(discard: Callable[[T], object], task: "asyncio.Task[T]") -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())
