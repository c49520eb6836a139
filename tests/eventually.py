"""Waits for a condition with a deadline: the only place where tests poll."""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

T = TypeVar("T")

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.005, 0.05


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
    began_s = time.monotonic()
    with anyio.move_on_after(deadline_s):
        while True:
            value = condition()
            seen = await value if inspect.isawaitable(value) else value
            if seen:
                return seen
            await anyio.sleep(_interval_s(began_s))
    raise AssertionError(f"not within {deadline_s:g} s: {what} (last seen: {seen!r})")


def until_sync(condition: Callable[[], T], *, deadline_s: float = 60.0, what: str) -> T:
    """`until` for tests without an event loop."""
    began_s = time.monotonic()
    while not (seen := condition()):
        if time.monotonic() > began_s + deadline_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what} (last seen: {seen!r})")
        time.sleep(_interval_s(began_s))
    return seen


def _interval_s(began_s: float) -> float:
    """A twentieth of the time waited so far: a long wait leaves the processor to what is being waited for."""
    return min(max((time.monotonic() - began_s) / 20, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)
