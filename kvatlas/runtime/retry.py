"""Waiting for servers that are not there yet, with back-off: the one place that decides how often to try again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvatlas.errors import AccessDenied, NoIndexYet, Unreachable
from kvatlas.runtime.backoff import Backoff

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 5.0


async def retry_until_reachable(
    attempt: Callable[[], Awaitable[T]], *, wait: bool, on_wait: Callable[[str], None] | None = None
) -> T:
    """What `attempt` returns. With `wait` it is made again while it raises Unreachable or NoIndexYet, and `on_wait` gets
    the line for the user each time. Raises what `attempt` raises: these at once without `wait`, AccessDenied always."""
    backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
    while True:
        try:
            return await attempt()
        except AccessDenied:
            raise
        except (Unreachable, NoIndexYet) as error:
            if not wait:
                raise
            pause_s = backoff.next_s()
            if on_wait is not None:
                on_wait(f"{error}; trying again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
