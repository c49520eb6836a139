"""This router's requests that wait while every worker of their pool is over its limits.

A request that waits here rather than in an engine goes to the first worker with room. The pool has one order for all routers
(`kvatlas.reservations.pool_queue`): the store decides whose turn it is, and this router asks for the turns of its own
requests. If the store does not answer, the router keeps the same order among its own requests.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol, TypeVar

from kvatlas.errors import KvatlasError
from kvatlas.reservations import MustWait, QueueIsFull, Turns, WaitingRequest
from kvatlas.reservations.waiting_request import Place
from kvatlas.runtime.background_task import end_tasks
from router_client.errors import NoWorkers

T = TypeVar("T")

LOOK_S = 0.1
"""Interval at which a router asks for its turns. Other routers' requests free room too, and engines' reports may show some."""
NEAR_LOOK_S = 0.02
"""Interval if one of the router's requests may soon have its turn: a freed slot stays idle until the router asks."""
LEAST_LOOK_S = 0.01
"""Shortest interval, used while this router's requests are ending."""
MISSING_LOOKS = 3
"""Number of checks after which requests that the store has lost are sent to it again. If it has lost all of them, they are
sent again immediately."""

FORGOTTEN_S = 2.0
"""If a router has not asked for this long, the store has dropped its waiting requests. A router without waiting requests does
not ask."""
REST_S = 0.5
"""How long a request stays out of the queue if its router sees only workers that have asked for a pause."""

_log = logging.getLogger("kvatlas_router.admission")


class QueueFull(KvatlasError):
    """No more requests may wait, or this one has waited too long. `retry_after_s`: when to retry, in seconds from
    now."""

    def __init__(self, line: str, retry_after_s: int) -> None:
        super().__init__(line)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Limits of each pool's queue: the number of `requests` (0: no queue, so requests go to full engines), the total `tokens`
    of their prompts, and the longest wait."""

    requests: int = 0
    tokens: int = 1_000_000
    wait_s: float = 30.0


class TurnSource(Protocol):
    """Where turns come from; implemented by `RouterClient`."""

    async def turns(
        self, pool_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> tuple[Turns, bool]: ...


Book = Callable[[WaitingRequest, frozenset[str]], Awaitable[T | None]]
"""Books a worker other than the given ones for a request that may wait. Returns None if all workers are resting. Raises
MustWait or QueueIsFull."""


@dataclass(slots=True)
class Wait:
    """One request's wait, as its client may see it. `waited_s`: time until it was booked or ended; `reason`: `full`,
    `turn`, or `rest` if every engine has asked for a pause; `alone`: this router, not the pool, decided its place."""

    reason: str = ""
    place: Place | None = None
    waited_s: float = 0.0
    alone: bool = False

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __str__(self) -> str:
        """As a structured field (RFC 9651): `full;ahead=3;waiting=12;waited-ms=850;by=pool`."""
        place = "" if self.place is None else f";ahead={self.place.ahead};waiting={self.place.requests}"
        return f"{self.reason}{place};waited-ms={self.waited_s * 1e3:.0f};by={'router' if self.alone else 'pool'}"


@dataclass(slots=True)
class _Ticket:
    """A waiting request. `turn` is set when it may be tried on workers other than `blocked`, or when it was `refused`."""

    request: WaitingRequest
    arrived_s: float
    until_s: float
    wait: Wait
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    blocked: frozenset[str] = frozenset()
    refused: bool = False
    entered: bool = False
    rests_until_s: float = 0.0
    """Until this time the request is in no queue, because this router sees only workers that have asked for a pause. Other
    routers may see more workers."""

    def row(self, now_s: float) -> WaitingRequest:
        """The request, with its current age and its remaining time."""
        age_us, left_us = round((now_s - self.arrived_s) * 1e6), round((self.until_s - now_s) * 1e6)
        return replace(self.request, age_us=max(0, age_us), left_us=max(0, left_us))

    def record(self, error: MustWait) -> None:
        """Record the request's place in the queue."""
        if not self.wait:
            self.wait.reason, self.wait.place, self.wait.alone = error.place.reason.value, error.place, error.alone
        if not self.entered and error.request is not None:
            known = error.request
            self.request = replace(self.request, workers=known.workers, output_tokens=known.output_tokens)
        self.entered = error.filed


@dataclass(slots=True)
class _Line:
    """This router's part of one pool's queue. `moved` is set when a worker may have room. `seen`: the queue's last known
    state."""

    tickets: dict[bytes, _Ticket] = field(default_factory=dict)
    left: set[bytes] = field(default_factory=set)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    asking: asyncio.Task[None] | None = None
    seen: Turns | None = None
    look_s: float = LOOK_S
    missed: int = 0
    shared_s: float = 0.0
    """When the store was last asked."""
    served_at: float | None = None
    gap_s: float = 1.0
    """Smoothed time between two served requests."""


class AdmissionQueue:
    """This router's part of each pool's queue."""

    def __init__(
        self, settings: QueueSettings, source: TurnSource, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._source = source
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def waiting(self) -> int:
        """Number of this router's waiting requests in all pools."""
        return sum(len(line.tickets) for line in list(self._lines.values()))  # metrics are read on another thread

    def pool_waiting(self) -> int:
        """Number of waiting requests from all routers, in the pools in which this router has waiting requests."""
        lines = [line for line in list(self._lines.values()) if line.tickets]
        return sum(max(len(line.tickets), line.seen.requests if line.seen else 0) for line in lines)

    async def admit(
        self, pool_id: str, request: WaitingRequest, book: Book[T], wait: Wait, wait_s: float | None = None
    ) -> T:
        """Book a worker when it is the request's turn. `wait`: filled in if it waits. `wait_s`: how long it may wait, if that
        is less than the settings allow.

        Raises QueueFull, or whatever `book` raises.
        """
        line, now = self._lines.setdefault(pool_id, _Line()), self._clock()
        longest_s = min(self.settings.wait_s, wait_s or self.settings.wait_s)
        ticket = _Ticket(request, now, now + longest_s, wait)
        booked: T | None = None
        try:
            if (booked := await self._try(line, ticket, book)) is None:
                booked = await self._wait(pool_id, line, ticket, book)
            return booked
        finally:
            if booked is None or wait:  # the store may still have it
                self._leave(pool_id, line, ticket, served=booked is not None)

    def record_end(self, pool_id: str) -> None:
        """Record that one of this router's requests ended, so there may be room."""
        if (line := self._lines.get(pool_id)) is not None and line.tickets:
            line.moved.set()

    async def close(self) -> None:
        """Stop asking. Requests still waiting in the store are dropped when their time is up."""
        tasks = [line.asking for line in self._lines.values() if line.asking is not None]
        await end_tasks(tasks)

    # ------------------------------------------------------------ one request

    async def _try(self, line: _Line, ticket: _Ticket, book: Book[T]) -> T | None:
        """Try to book; None if the request has to wait. Raises QueueFull, or whatever `book` raises."""
        try:
            booked = await book(ticket.row(self._clock()), ticket.blocked)
        except MustWait as error:
            ticket.record(error)
            return None
        except QueueIsFull as error:
            raise QueueFull(str(error), self._retry_after_s(line)) from error
        except NoWorkers:
            if not ticket.blocked:
                raise
            return None
        if booked is None:
            ticket.wait.reason = ticket.wait.reason or "rest"
            ticket.rests_until_s, ticket.entered = self._clock() + REST_S, False
            line.left.add(ticket.request.id)
        return booked

    async def _wait(self, pool_id: str, line: _Line, ticket: _Ticket, book: Book[T]) -> T:
        line.tickets[ticket.request.id] = ticket
        line.left.discard(ticket.request.id)  # a check may have mistaken it for a request that left
        self._ask_for_turns(pool_id, line)
        try:
            async with asyncio.timeout(max(0.0, ticket.until_s - self._clock())):
                while True:
                    await ticket.turn.wait()
                    if ticket.refused:
                        seen = line.seen or Turns(0, 0, 0)
                        raise QueueFull(str(QueueIsFull(seen.requests, seen.tokens)), self._retry_after_s(line))
                    if (booked := await self._try(line, ticket, book)) is not None:
                        return booked
                    ticket.turn.clear()
        except TimeoutError as error:
            longest_s = ticket.until_s - ticket.arrived_s
            text = f"every worker was full for {longest_s:g} s, the longest that a request may wait"
            raise QueueFull(text, self._retry_after_s(line)) from error
        finally:
            ticket.wait.waited_s = self._clock() - ticket.arrived_s

    def _leave(self, pool_id: str, line: _Line, ticket: _Ticket, *, served: bool) -> None:
        line.tickets.pop(ticket.request.id, None)
        line.left.add(ticket.request.id)
        if served:
            self._record_served(line)
        line.moved.set()
        self._ask_for_turns(pool_id, line)

    # ------------------------------------------------------------ turns

    def _ask_for_turns(self, pool_id: str, line: _Line) -> None:
        if line.asking is None or line.asking.done():
            line.asking = asyncio.create_task(self._keep_asking(pool_id, line), name="kvatlas turns")

    async def _keep_asking(self, pool_id: str, line: _Line) -> None:
        """Ask for turns until none of this router's requests is waiting."""
        while line.tickets or line.left:
            line.moved.clear()
            try:
                await self._ask(pool_id, line)
            except KvatlasError as error:
                _log.warning("pool %s: turns of waiting requests were not read (%s); trying again", pool_id, error)
            try:
                async with asyncio.timeout(line.look_s):
                    await asyncio.sleep(LEAST_LOOK_S)
                    await line.moved.wait()
            except TimeoutError:
                pass

    async def _ask(self, pool_id: str, line: _Line) -> None:
        again = line.missed >= MISSING_LOOKS
        now = self._clock()
        waiting = [ticket for ticket in line.tickets.values() if ticket.rests_until_s <= now]
        rows = [ticket.row(now) for ticket in waiting if again or not ticket.entered]
        left = line.left - {row.id for row in rows}
        turns, shared = await self._source.turns(pool_id, left, rows)
        line.seen = turns if shared else None
        line.look_s = NEAR_LOOK_S if turns.near else LOOK_S
        line.shared_s = now if shared else line.shared_s
        if shared or not line.tickets or now - line.shared_s > FORGOTTEN_S:
            line.left -= left
        if shared:
            for row in rows:
                ticket = line.tickets.get(row.id)
                if ticket is not None and ticket.rests_until_s <= now:  # otherwise it has left in the meantime
                    ticket.entered = True
                    line.left.discard(row.id)
        if turns.own >= len(waiting) or again:
            line.missed = 0
        else:
            line.missed += MISSING_LOOKS if not turns.own else 1
        for id in turns.refused:
            if (waits := line.tickets.get(id)) is not None:
                waits.refused = True
                waits.turn.set()
        for id, blocked in turns.turns.items():
            if (waits := line.tickets.get(id)) is not None:
                waits.blocked = blocked
                waits.turn.set()
            else:
                line.left.add(id)

    # ------------------------------------------------------------ how fast it moves

    def _record_served(self, line: _Line) -> None:
        now = self._clock()
        if line.served_at is not None:
            line.gap_s += (min(now - line.served_at, self.settings.wait_s) - line.gap_s) / 8
        line.served_at = now

    def _retry_after_s(self, line: _Line) -> int:
        """Approximate seconds until this router's waiting requests are served."""
        return max(1, min(60, ceil(len(line.tickets) * line.gap_s)))
