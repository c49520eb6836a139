"""Waits for a condition with a deadline: the only place where tests poll."""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

T = TypeVar("T")

_INTERVAL_S = 0.005


@overload
async def until(condition: Callable[[], Awaitable[T]], *, deadline_s: float = 60.0, what: str) -> T: ...
@overload
async def until(condition: Callable[[], T], *, deadline_s: float = 60.0, what: str) -> T: ...
async def until(condition: Callable[[], Any], *, deadline_s: float = 60.0, what: str) -> Any:
    """The first truthy value of `condition`, a plain or async function that is polled.

    A hanging condition is cancelled at the deadline. Raises AssertionError, naming `what` and the last value; an exception
    of the condition is raised at once.
    """
    seen: Any = None
    with anyio.move_on_after(deadline_s):
        while True:
            value = condition()
            seen = await value if inspect.isawaitable(value) else value
            if seen:
                return seen
            await anyio.sleep(_INTERVAL_S)
    raise AssertionError(f"not within {deadline_s:g} s: {what} (last seen: {seen!r})")


def until_sync(condition: Callable[[], T], *, deadline_s: float = 60.0, what: str) -> T:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + deadline_s
    while not (seen := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {what} (last seen: {seen!r})")
        time.sleep(_INTERVAL_S)
    return seen
