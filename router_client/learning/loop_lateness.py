"""Measures how late an event loop runs, because every time measured in it is late by the same amount.

A busy router (one with hundreds of concurrent requests, or other programs on its processors) sees an engine's answer late. If
that delay were attributed to the engine, the engine that serves a burst would look many times slower than its equals.
"""

import asyncio
import time
from collections import deque
from typing import ClassVar
from weakref import ReferenceType, WeakKeyDictionary, ref

TICK_S = 0.01
LEAST_NS = 2_000_000
"""Smaller delays are within the resolution of timers."""
MOST_KEPT = 4_096
"""Maximum number of late ticks that are kept. For a loop that is never on time, these cover about the last minute."""


class Watch:
    """What all watchers of a loop hold: it is gone once the last of them is."""

    __slots__ = ("__weakref__",)


class LoopLateness:
    """The lateness of one event loop. Ticks only while it is being watched, so that it does not wake up an idle
    router."""

    _of_loop: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLateness]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._watch: ReferenceType[Watch] | None = None
        self._due_ns: int | None = None
        """When the next tick should be; None if there are no watchers."""
        self._late: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)
        """When late ticks should have been, and when they were, ascending."""

    @classmethod
    def of_running_loop(cls) -> "LoopLateness | None":
        """The lateness of the running loop; None if no loop is running."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if loop not in cls._of_loop:
            cls._of_loop[loop] = cls()
        return cls._of_loop[loop]

    @property
    def ticks(self) -> bool:
        return self._due_ns is not None

    def watch(self) -> Watch:
        """Tick as long as anyone holds the result."""
        watch = self._current_watch()
        if watch is None:
            watch = Watch()
            self._watch = ref(watch)
        if self._due_ns is None:
            self._schedule()
        return watch

    def most_ns(self, start_ns: int, end_ns: int) -> int:
        """The loop's largest lateness, in nanoseconds, between two values of `time.perf_counter_ns`; 0 if it was on
        time."""
        most = 0
        if self._due_ns is not None and self._due_ns < end_ns:
            most = time.perf_counter_ns() - self._due_ns  # it has not ticked yet
        for due_ns, was_ns in reversed(self._late):
            if was_ns < start_ns:
                break
            if due_ns < end_ns:
                most = max(most, was_ns - due_ns)
        return most if most >= LEAST_NS else 0

    def _current_watch(self) -> Watch | None:
        return None if self._watch is None else self._watch()

    def _schedule(self) -> None:
        self._due_ns = time.perf_counter_ns() + round(TICK_S * 1e9)
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter_ns()
        assert self._due_ns is not None
        if now - self._due_ns >= LEAST_NS:
            self._late.append((self._due_ns, now))
        if self._current_watch() is not None:
            self._schedule()
        else:
            self._due_ns = None
