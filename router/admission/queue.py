"""Requests that wait in the router while every worker of their pool is over its limits.

A request that waits here rather than in an engine goes to the first worker with room, and the router sets the order: by
priority, then fairly between tenants.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import TypeVar

from kvatlas.errors import KvatlasError

T = TypeVar("T")

LOOK_S = 0.1
"""Interval at which the first in line checks for room freed by other routers' requests or shown by engines' reports."""


class QueueFull(KvatlasError):
    """No more requests may wait, or this one waited too long. `retry_after_s`: seconds until a retry."""

    def __init__(self, line: str, retry_after_s: int) -> None:
        super().__init__(line)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Limits of each pool's queue: `requests` (0: no queue, so requests go to full engines), their prompts' `tokens`, and the
    longest wait."""

    requests: int = 0
    tokens: int = 1_000_000
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A place in line: by lower `priority`, then the tenant with the least service, then the order of arrival."""

    priority: int
    start: float
    number: int
    tenant: str = field(compare=False)
    tokens: int = field(compare=False)


class FairQueue:
    """Start-time fair queueing within each priority. A tenant's tickets start one after another, each delayed by its
    predecessor's tokens; a new tenant starts at the current service time. Each priority has its own time, since serving one
    priority says nothing about the progress of the others. Pure."""

    def __init__(self) -> None:
        self.tokens = 0
        self._heap: list[Ticket] = []
        self._gone: set[int] = set()
        self._ends: dict[tuple[int, str], float] = {}
        self._now: dict[int, float] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def push(self, priority: int, tenant: str, tokens: int) -> Ticket:
        """Take a new place in line."""
        start = max(self._now.get(priority, 0.0), self._ends.get((priority, tenant), 0.0))
        ticket = Ticket(priority, start, next(self._numbers), tenant, tokens)
        self._ends[priority, tenant] = start + max(1, tokens)
        self.tokens += tokens
        heapq.heappush(self._heap, ticket)
        return ticket

    def first(self) -> Ticket | None:
        """The ticket whose turn it is."""
        while self._heap and self._heap[0].number in self._gone:
            self._gone.discard(heapq.heappop(self._heap).number)
        return self._heap[0] if self._heap else None

    def remove(self, ticket: Ticket, *, served: bool) -> None:
        """Remove a ticket from the line."""
        self._gone.add(ticket.number)
        self.tokens -= ticket.tokens
        if served:
            self._now[ticket.priority] = max(self._now.get(ticket.priority, 0.0), ticket.start)
        if self.first() is None:
            self._ends.clear()
            self._now.clear()


@dataclass(slots=True)
class _Line:
    """One pool's line. `moved` is set when its first ticket changes, or when there may be room."""

    queue: FairQueue = field(default_factory=FairQueue)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    served_at: float | None = None
    gap_s: float = 1.0
    """Smoothed time between two served requests."""


class AdmissionQueue:
    """The lines of one router. Each router has its own, so R routers have R times the limit together."""

    def __init__(self, settings: QueueSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def waiting(self) -> int:
        """Number of waiting requests in all pools."""
        return sum(len(line.queue) for line in list(self._lines.values()))  # metrics are read on another thread

    async def admit(
        self, pool_id: str, book: Callable[[], Awaitable[T | None]], *, priority: int, tenant: str, tokens: int
    ) -> T:
        """Wait for this request's turn, until `book` returns a booking (None: every worker is full).

        Raises QueueFull, and what `book` raises.
        """
        line = self._lines.setdefault(pool_id, _Line())
        if line.queue.first() is None and (booked := await book()) is not None:
            return booked
        most = self.settings
        if len(line.queue) >= most.requests or (len(line.queue) and line.queue.tokens + tokens > most.tokens):
            raise QueueFull(
                f"every worker is full, and {len(line.queue)} requests of {line.queue.tokens} tokens wait already",
                self._retry_after_s(line),
            )
        ticket = line.queue.push(priority, tenant, tokens)
        served = False
        try:
            async with asyncio.timeout(most.wait_s):
                while True:
                    if line.queue.first() is ticket and (booked := await book()) is not None:
                        served = True
                        return booked
                    await self._wait_for_move(line)
        except TimeoutError as error:
            line_text = f"every worker was full for {most.wait_s:g} s, the longest that a request may wait"
            raise QueueFull(line_text, self._retry_after_s(line)) from error
        finally:
            line.queue.remove(ticket, served=served)
            if served:
                self._record_served(line)
            self._move(line)

    def record_end(self, pool_id: str) -> None:
        """Record that a request of this router ended, so there may be room."""
        if (line := self._lines.get(pool_id)) is not None and len(line.queue):
            self._move(line)

    def _move(self, line: _Line) -> None:
        line.moved.set()
        line.moved = asyncio.Event()

    async def _wait_for_move(self, line: _Line) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await line.moved.wait()
        except TimeoutError:
            return

    def _record_served(self, line: _Line) -> None:
        now = self._clock()
        if line.served_at is not None:
            line.gap_s += (min(now - line.served_at, self.settings.wait_s) - line.gap_s) / 8
        line.served_at = now

    def _retry_after_s(self, line: _Line) -> int:
        """Approximate seconds until all waiting requests are served."""
        return max(1, min(60, ceil(len(line.queue) * line.gap_s)))
