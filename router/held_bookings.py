"""Bookings for requests that another program sends, held until that program reports their end or until they time out.

A booking's id names its pool, its worker and its reservations in the store, so its end can be reported to any router of the
pool. Only the router that made a booking learns from its answer. That router drops the booking once it finds that the store
no longer has it. A booking also ends with its router's lease: when the router stops, or a few seconds after it was killed.
"""

import asyncio
import binascii
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Protocol

import msgpack

from kvatlas.errors import KvatlasError, Unreachable
from kvatlas.reservations import Outcome
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.deadline import STORE_FAILURES
from router_client.client import RouterClient
from router_client.learning.timings import AnswerClock, Timings
from router_client.learning.token_counts import Usage
from router_client.prefill_decode_result import PairChoice
from router_client.prompt import Prompt
from router_client.results import Choice

HELD_S = 600.0
ID_VERSION = 1
MOST_HELD = 100_000
MOST_HELD_OF_CLIENT = 2_000
"""A client that holds more bookings has forgotten to end some, since an engine runs only a few hundred requests at a
time."""
MOST_ENDED = 10_000
CHECK_S = 15.0
"""A booking whose end has been reported to another router is dropped within twice this time."""

_log = logging.getLogger("kvatlas_router.proxy")


class TooManyHeld(KvatlasError):
    """The router or one of its clients holds too many bookings."""


class HeldCounters(Protocol):
    """`held`: bookings that were made. `held_done`: bookings whose end was reported here. `held_expired`: bookings released
    because their end was never reported."""

    held: int
    held_done: int
    held_expired: int


@dataclass(frozen=True, slots=True)
class BookingId:
    """The content of a booking's id. If `pool_id` is '', nothing is booked in the store. `reservations`: first the answering
    worker's, then that of a separate prefill worker, if any."""

    pool_id: str
    worker_id: str
    reservations: tuple[bytes, ...]

    def __str__(self) -> str:
        packed = msgpack.packb((ID_VERSION, self.pool_id, self.worker_id, self.reservations))
        return urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> "BookingId | None":
        """Parse an id; None for any other text."""
        try:
            found = msgpack.unpackb(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            version, pool_id, worker_id, ids = found
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException):
            return None
        valid = (
            version == ID_VERSION and isinstance(pool_id, str) and isinstance(worker_id, str) and isinstance(ids, list)
        )
        if not valid or not all(isinstance(id, bytes) and len(id) == ID_BYTES for id in ids):
            return None
        return cls(pool_id, worker_id, tuple(ids))


@dataclass(slots=True)
class _HeldBooking:
    choice: asyncio.Future[Choice | PairChoice]
    client: str
    id: BookingId | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    checked: bool = False
    ended_elsewhere: bool = False
    usage: Usage | None = None
    timings: Timings | None = None
    well: bool = False
    clock: AnswerClock = field(default_factory=AnswerClock)


class HeldBookings:
    """Runs one task per booking; the task makes and releases it. `close` releases them all."""

    def __init__(
        self,
        client: RouterClient,
        counters: HeldCounters,
        *,
        held_s: float = HELD_S,
        most: int = MOST_HELD,
        most_of_client: int = MOST_HELD_OF_CLIENT,
        check_s: float = CHECK_S,
    ) -> None:
        """`held_s`: a booking whose end has not been reported after this time is released."""
        self._client = client
        self._counters = counters
        self._held_s = held_s
        self._most = most
        self._most_of_client = most_of_client
        self._of_client: Counter[str] = Counter()
        self._held: dict[str, _HeldBooking] = {}
        self._check_s = check_s
        self._check = BackgroundTask(self._let_go_of_ended, "check of held bookings")
        self._tasks: dict[asyncio.Task[None], _HeldBooking] = {}
        self._ended: dict[str, None] = {}
        """The most recent ids whose end was reported here; the store learns of it slightly later."""

    def __len__(self) -> int:
        return len(self._held)

    async def book(
        self, prompt: Prompt, avoid: frozenset[str] = frozenset(), *, pd: bool = False, client: str = ""
    ) -> tuple[str, Choice | PairChoice]:
        """Book a worker. Returns the booking's id, which is needed to end it, and the choice. `pd`: book a pair as
        `route_pd` does. `client`: the caller, whose bookings are limited. Raises TooManyHeld, or whatever
        `RouterClient.route` raises."""
        own = self._of_client[client]
        if len(self._tasks) >= self._most or own >= self._most_of_client:
            booked = f"{own} bookings of this client ({len(self._tasks)} in all) have not ended"
            raise TooManyHeld(f"{booked}; report each request's end to /kvatlas/done")
        if not self._check.running:
            self._check.start()
        route: AbstractAsyncContextManager[Choice | PairChoice]
        route = self._client.route_pd(prompt, avoid=avoid) if pd else self._client.route(prompt, avoid=avoid)
        held = _HeldBooking(asyncio.get_running_loop().create_future(), client)
        task = asyncio.ensure_future(self._hold(held, route))
        self._tasks[task] = held
        self._of_client[client] += 1
        task.add_done_callback(self._forget)
        try:
            choice = await asyncio.shield(held.choice)
        except BaseException:
            held.over.set()
            raise
        self._counters.held += 1
        held.clock = AnswerClock()
        return str(held.id), choice

    async def first_token(self, held_id: str) -> bool:
        """Record that the request's prefill is over. Returns False if no router holds the id."""
        held = self._held.get(held_id)
        if held is None:
            return await self._report_elsewhere(held_id, None)
        held.clock.part()
        await (await asyncio.shield(held.choice)).first_token()
        return True

    def end(self, held_id: str, usage: Usage | None, timings: Timings | None = None, *, well: bool) -> bool:
        """Record that the request is over; `well`: it was answered successfully. Returns False if this router does not
        hold the id.

        Without `timings`, the time from `book` to `first_token` counts as the time to the first token.
        """
        held = self._held.pop(held_id, None)
        if held is None:
            return False
        self._ended[held_id] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        held.usage, held.timings, held.well = usage, timings or held.clock.first_part(), well
        held.over.set()
        return True

    async def end_elsewhere(self, held_id: str, *, well: bool) -> bool:
        """End another router's booking. Returns False if no router holds the id. Raises Unreachable."""
        return await self._report_elsewhere(held_id, Outcome.FINISHED if well else Outcome.FAILED)

    async def _report_elsewhere(self, held_id: str, outcome: Outcome | None) -> bool:
        booking = BookingId.parse(held_id)
        if booking is None or not booking.pool_id or held_id in self._ended:
            return False
        known = [await self._client.record_end(booking.pool_id, id, outcome) for id in booking.reservations]
        return any(known)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        client = self._tasks.pop(task).client
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]

    async def close(self) -> None:
        """Release everything."""
        await self._check.stop()
        for held in self._tasks.values():
            held.over.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _hold(self, held: _HeldBooking, route: AbstractAsyncContextManager[Choice | PairChoice]) -> None:
        id = BookingId("", "", ())
        try:
            async with AsyncExitStack() as stack:
                try:
                    choice = await stack.enter_async_context(route)
                except KvatlasError as error:
                    if not held.choice.done():  # the caller may have given up
                        held.choice.set_exception(error)
                    return
                held.id = id = _id_of(choice)
                self._held[str(id)] = held
                if not held.choice.done():
                    held.choice.set_result(choice)
                try:
                    async with asyncio.timeout(self._held_s):
                        await held.over.wait()
                except TimeoutError:
                    self._counters.held_expired += await self._is_booked(id)
                else:
                    self._counters.held_done += not held.ended_elsewhere
                await choice.done(200 if held.well else 0, held.usage, held.timings)
        except Unreachable as error:  # a reservation that could not be released expires
            _log.warning("held booking %s was not released (%s); it ends when its lease expires", id, error)
        finally:
            self._held.pop(str(id), None)
            if not held.choice.done():
                held.choice.cancel()

    async def _let_go_of_ended(self) -> None:
        """Drop the bookings that the store no longer has: either their end was reported to another router, or this
        router's lease expired."""
        while self._check.running:
            await asyncio.sleep(self._check_s)
            by_pool: dict[str, dict[bytes, _HeldBooking]] = {}
            for held in self._held.values():
                if held.checked and held.id is not None and held.id.pool_id:
                    by_pool.setdefault(held.id.pool_id, {})[held.id.reservations[0]] = held
                held.checked = True  # look it up only in the next round: short answers have ended by then
            for pool_id, by_id in by_pool.items():
                try:
                    booked = await self._client.find_booked(pool_id, list(by_id))
                except STORE_FAILURES as error:
                    _log.debug("held bookings of pool %s were not checked: %s", pool_id, error)
                    continue
                for id in by_id.keys() - booked:
                    by_id[id].ended_elsewhere = True
                    by_id[id].over.set()

    async def _is_booked(self, id: BookingId) -> bool:
        """Release the booking. True if it was still booked, or if the store can't be reached; False if its end was reported to
        another router."""
        try:
            return not id.pool_id or await self._report_elsewhere(str(id), Outcome.FAILED)
        except STORE_FAILURES:
            return True


def _id_of(choice: Choice | PairChoice) -> BookingId:
    parts = (choice.decode, choice.prefill) if isinstance(choice, PairChoice) else (choice,)
    reservations = [part.reservation for part in parts if part is not None and part.reservation is not None]
    if not reservations:
        return BookingId("", choice.worker_id, (token_bytes(ID_BYTES),))
    return BookingId(reservations[0].pool_id, choice.worker_id, tuple(reservation.id for reservation in reservations))
