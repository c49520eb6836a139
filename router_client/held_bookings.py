"""Bookings for requests that another program sends: held until it reports their end, or until they are too old."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from kvatlas.errors import KvatlasError, Unreachable
from router_client.client import RouterClient
from router_client.learning.timings import AnswerClock, Timings
from router_client.prefill_decode_result import PairChoice
from router_client.prompt import Prompt
from router_client.results import Choice
from router_client.tokens.usage import Usage

HELD_S = 600.0
MOST_HELD = 100_000

_log = logging.getLogger("router_client.proxy")


class TooManyHeld(KvatlasError):
    """More bookings are held than a router should have."""


class HeldCounters(Protocol):
    """`held`: bookings made; `held_done`: their end was reported; `held_expired`: released because it never was."""

    held: int
    held_done: int
    held_expired: int


@dataclass(slots=True)
class _HeldBooking:
    choice: asyncio.Future[Choice | PairChoice]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    usage: Usage | None = None
    timings: Timings | None = None
    well: bool = False
    clock: AnswerClock = field(default_factory=AnswerClock)


class HeldBookings:
    """Enters and leaves each booking in a task of its own; `close` leaves them all."""

    def __init__(
        self, client: RouterClient, counters: HeldCounters, *, held_s: float = HELD_S, most: int = MOST_HELD
    ) -> None:
        """`held_s`: a booking whose end is not reported by then is released."""
        self._client = client
        self._counters = counters
        self._held_s = held_s
        self._most = most
        self._held: dict[str, _HeldBooking] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def book(
        self, prompt: Prompt, avoid: frozenset[str] = frozenset(), *, pd: bool = False
    ) -> tuple[str, Choice | PairChoice]:
        """An id to end the booking with, and the worker; `pd`: as by `route_pd`. Raises what `RouterClient.route` raises,
        and TooManyHeld."""
        if len(self._held) >= self._most:
            raise TooManyHeld(f"{len(self._held)} requests are booked and not done; expected /v1/done for each")
        route: AbstractAsyncContextManager[Choice | PairChoice]
        route = self._client.route_pd(prompt, avoid=avoid) if pd else self._client.route(prompt, avoid=avoid)
        held_id = uuid4().hex
        held = _HeldBooking(asyncio.get_running_loop().create_future())
        self._held[held_id] = held
        task = asyncio.ensure_future(self._hold(held_id, held, route))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            choice = await asyncio.shield(held.choice)
        except BaseException:
            held.over.set()
            raise
        self._counters.held += 1
        held.clock = AnswerClock()
        return held_id, choice

    async def first_token(self, held_id: str) -> bool:
        """The request's prefill is over. False for an id that is not held (any more)."""
        held = self._held.get(held_id)
        if held is None:
            return False
        held.clock.part()
        await (await asyncio.shield(held.choice)).first_token()
        return True

    def end(self, held_id: str, usage: Usage | None, timings: Timings | None = None, *, well: bool) -> bool:
        """The request is over; `well`: it was answered. False for an id that is not held (any more).

        Without `timings` the time from `book` to `first_token` counts as the time to the first token.
        """
        held = self._held.pop(held_id, None)
        if held is None:
            return False
        held.usage, held.timings, held.well = usage, timings or Timings(held.clock.ttft_us), well
        held.over.set()
        return True

    async def close(self) -> None:
        """Release everything."""
        for held in self._held.values():
            held.over.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _hold(
        self, held_id: str, held: _HeldBooking, route: AbstractAsyncContextManager[Choice | PairChoice]
    ) -> None:
        try:
            async with AsyncExitStack() as stack:
                try:
                    choice = await stack.enter_async_context(route)
                except KvatlasError as error:
                    if not held.choice.done():  # the caller may have given up
                        held.choice.set_exception(error)
                    return
                if not held.choice.done():
                    held.choice.set_result(choice)
                try:
                    async with asyncio.timeout(self._held_s):
                        await held.over.wait()
                except TimeoutError:
                    self._counters.held_expired += 1
                else:
                    self._counters.held_done += 1
                await (choice.finish(held.usage, held.timings) if held.well else choice.fail())
        except Unreachable as error:  # a reservation that could not be released expires
            _log.warning("held booking %s not released (%s); it ends when its lease expires", held_id, error)
        finally:
            self._held.pop(held_id, None)
            if not held.choice.done():
                held.choice.cancel()
