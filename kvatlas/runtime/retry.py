"""Retries for servers that can't be reached yet. This is the only place that decides when to retry."""

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
    """Return what `attempt` returns. If `wait` is set, retry with back-off for as long as it raises Unreachable or NoIndexYet.

    `on_wait` is called with a line for the user before each pause. Raises what `attempt` raises: always AccessDenied, and these
    two errors only if `wait` is not set.
    """
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
                on_wait(f"{error}; retrying in {pause_s:g} s")
        await asyncio.sleep(pause_s)
