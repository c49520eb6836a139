"""Blocking calls in a thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the call in a thread and return its result. A cancellation takes effect only after the call has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # it has been retrieved
        raise
