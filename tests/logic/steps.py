"""Runs coroutines without an event loop, one step at a time: each may be dropped between two steps, as by SIGKILL."""

from collections.abc import Coroutine, Generator
from typing import Any


class _Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield


async def pause() -> None:
    """Other tasks may run here."""
    await _Pause()


class Steps:
    """One coroutine under way; `step` returns False when it has ended."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine

    def step(self) -> bool:
        try:
            self._coroutine.send(None)
        except StopIteration:
            return False
        return True

    def drop(self) -> None:
        self._coroutine.close()


def to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run all steps without a pause."""
    steps = Steps(coroutine)
    while steps.step():
        pass
