"""Evaluates and books asks: in the store, together with all other routers, or alone if the store does not answer."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from math import inf
from secrets import token_bytes
from time import monotonic, perf_counter
from typing import Any, TypeVar

from kvatlas.cost.protocol import Load, mean_load
from kvatlas.errors import Unreachable
from kvatlas.reservations import (
    Ask,
    Booking,
    Evaluation,
    LookAlikesUnknown,
    LookupImpossible,
    MemoryReservations,
    MustWait,
    Outcome,
    QueueIsFull,
    Reservations,
    Turns,
    WaitingRequest,
    WorkerReport,
)
from kvatlas.reservations.evaluation import NOTHING_PREDICTED, Candidates, Weighed, WorkerLoad
from kvatlas.reservations.memory import NOTHING_LOOKED_UP, Held
from kvatlas.reservations.pool_queue import LEASE_US
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas.reservations.waiting_request import Place, WaitReason
from kvatlas.store.circuit_breaker import CircuitBreaker
from kvatlas.store.deadline import STORE_FAILURES, Deadline, LateCalls
from kvatlas.telemetry import sampled_context
from router_client.booking.leases import Leases
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.fleet_cache import FleetCache
from router_client.pricing.pool import Pool
from router_client.pricing.quotes import Quote
from router_client.prompt import Prompt
from router_client.settings import RouterSettings

T = TypeVar("T")

TURNS_MS = 250.0
"""Time to wait for the store's answer about turns: a quarter of the time for which requests keep their places without
asking."""


class Booker:
    """Books for one router. Books the worker that answers, then the prefill worker if that is a different one."""

    def __init__(
        self,
        fleet: FleetCache,
        reservations: Reservations,
        leases: Leases,
        settings: RouterSettings,
        counters: RouterCounters,
        late_calls: LateCalls,
        now_us: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._reservations = reservations
        self._leases = leases
        self._settings = settings
        self._counters = counters
        self._late_calls = late_calls
        self._now_us = now_us
        self._own = MemoryReservations(now_us)
        self._breaker = CircuitBreaker()
        self._waited: dict[str, tuple[float, Place]] = {}
        """By pool: when requests last waited in the store, and how many."""
        self._last_reported: dict[tuple[int, str], object] = {}

    @property
    def sorts_workers(self) -> bool:
        """True if the reservations know the workers by likeness, so that an ask may include look-alikes."""
        return self._settings.booking.reservations and self._reservations.fed_by_indexer

    @property
    def looks_up(self) -> bool:
        """True if the call that books can look up what workers hold."""
        return self.sorts_workers and self._reservations.look_up

    # ------------------------------------------------------------ in the store, with the other routers

    def may_call_store(self) -> bool:
        """False while calls to the store are suspended after failures; see `CircuitBreaker.may_call`."""
        return self._breaker.may_call()

    @property
    def is_trying(self) -> bool:
        """True if the store has failed. Then nothing should wait for the call that `may_call_store` allows."""
        return self._breaker.is_open

    async def try_store(self, call: Coroutine[Any, Any, T], deadline: Deadline) -> tuple[T | None, str]:
        """Return the call's result; if the store fails, None and the reason."""
        try:
            result = await call
        except STORE_FAILURES as error:
            self._counters.booking_failures += 1
            self._breaker.record_failure()
            return None, f"reservations: {deadline.describe(error)}"
        except (MustWait, QueueIsFull):
            self._breaker.record_success()
            raise
        self._breaker.record_success()
        return result, ""

    async def look(self, pool_id: str, ask: Ask) -> Evaluation:
        """The evaluation that `book` would make now. Books nothing. Raises whatever the store raises."""
        await self._report_workers(pool_id)
        return await self._reservations.evaluate(pool_id, ask)

    async def book(self, prompt: Prompt, ask: Ask, deadline: Deadline) -> tuple[Evaluation, tuple[Reservation, ...]]:
        """Choose and reserve in one call. Raises whatever the store raises, TimeoutError, MustWait or QueueIsFull; in that
        case, no booking remains."""
        pool_id = prompt.scope.pool_id
        await self._report_workers(pool_id)
        booking = self._new_booking(prompt, ask, leased=self._reservations.fed_by_indexer, waits=True)
        ids = [id for id in (booking.id, booking.prefill_id) if id is not None]
        answered = False
        try:
            began = perf_counter()
            evaluation = await deadline.wait_for(self._reservations.book(pool_id, booking))
            answered = True
            self._counters.booking_time.add(perf_counter() - began, span=sampled_context())
        except (LookAlikesUnknown, LookupImpossible):
            answered = True
            raise
        except QueueIsFull as error:
            answered = True
            self._record_waiting(pool_id, error.requests, error.tokens)
            raise
        except MustWait as error:
            answered = True
            self._record_waiting(pool_id, error.place.requests, error.place.tokens)
            error.request = booking.waiting
            raise
        finally:
            if not answered:  # the store may have booked it anyway, or may still do so
                for id in ids:
                    self._leases.report_later(pool_id, id, Outcome.CALLED_OFF)
        if evaluation is None:
            raise Unreachable(f"reservation {booking.id.hex()} was cancelled before it was made")
        booked = ids if evaluation.prefill is not None else ids[:1]
        deadline_ms = self._settings.deadline_ms
        return evaluation, tuple(
            Reservation(pool_id, id, self._reservations, self._leases, deadline_ms, self._late_calls) for id in booked
        )

    async def look_or_book(
        self, prompt: Prompt, ask: Ask, deadline: Deadline, *, book: bool
    ) -> tuple[Evaluation, tuple[Reservation, ...]]:
        """Do what `book` or `look` does, in one call. Raises whatever the store raises, or TimeoutError."""
        if book:
            return await self.book(prompt, ask, deadline)
        return await deadline.wait_for(self.look(prompt.scope.pool_id, ask)), ()

    # ------------------------------------------------------------ alone

    def look_alone(self, pool_id: str, ask: Ask, held: Held = NOTHING_LOOKED_UP) -> Evaluation:
        """Evaluate by the last-read loads and this router's own bookings. `held`: for an ask with a lookup, which may raise
        NotInHbm."""
        self._report_to_own(pool_id)
        return self._own.evaluate_now(pool_id, ask, held)

    def knows_a_load(self, pool_id: str, worker_ids: Collection[str]) -> bool:
        """True if the load of one of these workers is known."""
        self._report_to_own(pool_id)
        return self._own.knows_a_load(pool_id, worker_ids)

    def book_alone(self, prompt: Prompt, ask: Ask) -> tuple[Evaluation, tuple[Reservation, ...]]:
        """Reserve what `look_alone` would choose. Raises MustWait or QueueIsFull: a router that decides alone keeps a queue
        for its own requests. If the store was only late, they don't overtake the requests that are waiting there."""
        pool_id = prompt.scope.pool_id
        self._report_to_own(pool_id)
        booking = self._new_booking(prompt, ask, leased=False, waits=True)
        if booking.waiting is not None and booking.waiting.may_wait and not self._breaker.is_open:
            waited_s, place = self._waited.get(pool_id, (-inf, None))
            if place is not None and monotonic() - waited_s < LEASE_US / 1e6:
                raise MustWait(place, booking.waiting, filed=False)
        try:
            evaluation = self._own.book_now(pool_id, booking)
        except MustWait as error:
            error.request, error.alone = booking.waiting, True
            raise
        assert evaluation is not None  # a new booking was not cancelled
        ids = [booking.id]
        if evaluation.prefill is not None and booking.prefill_id is not None:
            ids.append(booking.prefill_id)
        return evaluation, tuple(Reservation(pool_id, id, self._own, None, None, self._late_calls) for id in ids)

    def wait_without_room(self, prompt: Prompt, evaluation: Evaluation) -> None:
        """Make the prompt wait, if it is allowed to, unless the worker that is chosen without reservations has room.
        Raises MustWait or QueueIsFull."""
        if (waiting := prompt.waiting) is None or not waiting.may_wait:
            return
        try:
            self._own.wait_without_room(prompt.scope.pool_id, self._leases.router_id, waiting, evaluation)
        except MustWait as error:
            error.request, error.alone = waiting, True
            raise

    async def turns(
        self, pool_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest], *, call_store: bool
    ) -> tuple[Turns, bool]:
        """Find out which of this router's waiting requests may be tried now (`Reservations.turns`), and whether the store
        decided that."""
        if call_store and self._settings.booking.reservations and self.may_call_store():
            deadline = Deadline(TURNS_MS, self._late_calls)
            call = self._reservations.turns(pool_id, self._leases.router_id, left, waiting)
            turns, _ = await self.try_store(deadline.wait_for(call), deadline)
            if turns is not None:
                self._record_waiting(pool_id, turns.requests, turns.tokens)
                return turns, True
        return self._own.turns_now(pool_id, self._leases.router_id, left, waiting), False

    # ------------------------------------------------------------ alone at first

    def book_behind(self, prompt: Prompt, ask: Ask) -> tuple[Evaluation, tuple[Reservation, ...]]:
        """Reserve what `look_alone` would choose, in this process now and in the store in the background. `ask`: must be
        for one worker."""
        pool_id = prompt.scope.pool_id
        evaluation, (mirror,) = self.book_alone(prompt, ask)
        booking = self._new_booking(prompt, ask, leased=self._reservations.fed_by_indexer)
        deadline_ms = self._settings.deadline_ms
        booked = Reservation(
            pool_id, booking.id, self._reservations, self._leases, deadline_ms, self._late_calls, mirror
        )
        self._late_calls.run_behind(self._confirm(pool_id, booking, booked))
        return evaluation, (booked,)

    async def _confirm(self, pool_id: str, booking: Booking, booked: Reservation) -> None:
        answered = False
        try:
            began = perf_counter()
            await self._report_workers(pool_id)
            await self._reservations.book(pool_id, booking)
            answered = True
            self._counters.booking_time.add(perf_counter() - began)
        except STORE_FAILURES:
            self._counters.booking_failures += 1
            self._breaker.record_failure()
        else:
            self._breaker.record_success()
            booked.report_again()
        finally:
            if not answered:  # the store may have booked it anyway, or may still do so
                self._leases.report_later(pool_id, booking.id, Outcome.CALLED_OFF)

    # ------------------------------------------------------------ pieces

    def _record_waiting(self, pool_id: str, requests: int, tokens: int) -> None:
        if requests:
            self._waited[pool_id] = monotonic(), Place(WaitReason.TURN, requests, requests, tokens)
        else:
            self._waited.pop(pool_id, None)

    def _new_booking(self, prompt: Prompt, ask: Ask, *, leased: bool, waits: bool = False) -> Booking:
        longest_us = round(self._settings.booking.longest_s * 1e6)
        # no lease is needed in this process: a reservation ends with the process at the latest
        lease_us = self._leases.lease_us if leased else longest_us
        prefill_id = None if ask.pair_layout is None else token_bytes(ID_BYTES)
        id = token_bytes(ID_BYTES)
        waiting = prompt.waiting if waits else None
        if waiting is not None:  # the expected length of the answer was not known before
            waiting = replace(waiting, output_tokens=prompt.output_tokens)
        return Booking(id, self._leases.router_id, prompt.input_tokens, ask, lease_us, longest_us, prefill_id, waiting)

    def _report_to_own(self, pool_id: str) -> None:
        if reports := self._new_reports(pool_id, self._own):
            self._own.report_now(pool_id, reports)
            self._own.forget_others(pool_id, reports)

    async def _report_workers(self, pool_id: str) -> None:
        """Report the pool as last read, unless an indexer reports to these reservations."""
        reservations = self._reservations
        if not reservations.fed_by_indexer and (reports := self._new_reports(pool_id, reservations)):
            await reservations.report(pool_id, reports)

    def _new_reports(self, pool_id: str, to: Reservations) -> dict[str, WorkerReport]:
        """New reports for these reservations; empty if the pool has not been read again since the last reports."""
        pool, key = self._fleet.last_known(pool_id), (id(to), pool_id)
        if pool is None or self._last_reported.get(key) is pool:
            return {}
        self._last_reported[key] = pool
        now_us = self._now_us()
        return {worker_id: WorkerReport.of(record, now_us) for worker_id, record in pool.records.items()}


def evaluate_without_bookings(ask: Ask, pool: Pool, quotes: Sequence[Quote]) -> Evaluation:
    """Evaluate by reported load alone; `quotes` belong to the ask's offers, workers of the pool."""
    loads = {quote.id: WorkerLoad(pool.loads[quote.id], Load()) for quote in quotes}
    mean = mean_load([load.reported for load in loads.values() if load.reported is not None])
    return Weighed.of(ask, Candidates.of(ask), loads.__getitem__, NOTHING_PREDICTED, mean, 0).choose()
