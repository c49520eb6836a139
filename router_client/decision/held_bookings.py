"""Workers booked for requests that somebody else sends: held until they are told done, or are too old."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from kvatlas.errors import KvatlasError, Unreachable
from router_client.decision.picker import Booked, Picker
from router_client.learning.timings import AnswerClock, Timings
from router_client.prompt import Prompt
from router_client.tokens.usage import Usage

HELD_S = 600.0
MOST_HELD = 100_000

_log = logging.getLogger("router_client.proxy")


class TooManyHeld(KvatlasError):
    """More workers are booked and not given back than a router should have."""


class HeldCounters(Protocol):
    """`held`: booked; `held_done`: told done; `held_expired`: given back because nobody told."""

    held: int
    held_done: int
    held_expired: int


@dataclass(slots=True)
class _Held:
    booked: asyncio.Future[Booked]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    usage: Usage | None = None
    timings: Timings | None = None
    well: bool = False
    clock: AnswerClock = field(default_factory=AnswerClock)


class HeldRoutes:
    """Each booking is entered and left in a task of its own; `close` leaves them all."""

    def __init__(
        self, picker: Picker, counters: HeldCounters, *, held_s: float = HELD_S, most: int = MOST_HELD
    ) -> None:
        """`held_s`: what nobody ended by then is given back."""
        self._picker = picker
        self._counters = counters
        self._held_s = held_s
        self._most = most
        self._held: dict[str, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def route(
        self, prompt: Prompt, avoid: frozenset[str] = frozenset(), *, pd: bool = False
    ) -> tuple[str, Booked]:
        """A worker, and the id to end its booking with; `pd`: a `PairChoice`. Raises what the picker raises, and
        TooManyHeld."""
        if len(self._held) >= self._most:
            raise TooManyHeld(f"{len(self._held)} requests are booked and not done; expected /v1/done for each")
        entered: AbstractAsyncContextManager[Booked]
        entered = self._picker.route_pd(prompt, avoid) if pd else self._picker.route(prompt, avoid)
        held_id = uuid4().hex
        held = _Held(asyncio.get_running_loop().create_future())
        self._held[held_id] = held
        task = asyncio.ensure_future(self._hold(held_id, held, entered))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            booked = await asyncio.shield(held.booked)
        except BaseException:
            held.over.set()
            raise
        self._counters.held += 1
        held.clock = AnswerClock()
        return held_id, booked

    async def first_token(self, held_id: str) -> bool:
        """The request's prefill is over. False for an id that is not held (any more)."""
        held = self._held.get(held_id)
        if held is None:
            return False
        held.clock.part()
        await (await asyncio.shield(held.booked)).first_token()
        return True

    def done(self, held_id: str, usage: Usage | None, timings: Timings | None = None, *, well: bool) -> bool:
        """The request is over; `well`: it was answered. False for an id that is not held (any more).

        Without `timings` the time to the first token is what passed from `route` to `first_token`.
        """
        held = self._held.pop(held_id, None)
        if held is None:
            return False
        held.usage, held.timings, held.well = usage, timings or Timings(held.clock.ttft_us), well
        held.over.set()
        return True

    async def close(self) -> None:
        """Give everything back."""
        for held in self._held.values():
            held.over.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _hold(self, held_id: str, held: _Held, entered: AbstractAsyncContextManager[Booked]) -> None:
        try:
            async with AsyncExitStack() as stack:
                try:
                    booked = await stack.enter_async_context(entered)
                except KvatlasError as error:
                    if not held.booked.done():  # the asker may have given up
                        held.booked.set_exception(error)
                    return
                if not held.booked.done():
                    held.booked.set_result(booked)
                try:
                    async with asyncio.timeout(self._held_s):
                        await held.over.wait()
                except TimeoutError:
                    self._counters.held_expired += 1
                else:
                    self._counters.held_done += 1
                await (booked.finish(held.usage, held.timings) if held.well else booked.fail())
        except Unreachable as error:  # what could not be given back ends by itself
            _log.warning("%s", error)
        finally:
            self._held.pop(held_id, None)
            if not held.booked.done():
                held.booked.cancel()
