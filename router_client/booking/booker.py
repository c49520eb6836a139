"""Booking: asks are weighed and booked in the store with all other routers, or alone where it does not answer."""

from collections.abc import Callable, Sequence
from secrets import token_bytes

from kvatlas.cost.protocol import Load
from kvatlas.errors import Unreachable
from kvatlas.reservations import (
    Ask,
    Booking,
    Evaluation,
    MemoryReservations,
    Outcome,
    Reservations,
    WorkerReport,
)
from kvatlas.reservations.evaluation import WorkerLoad, evaluate
from kvatlas.reservations.protocol import ID_BYTES
from router_client.booking.leases import Leases
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.fail_open import Breaker, Deadline, Patience
from router_client.decision.fleet_cache import CachedFleet
from router_client.pricing.pool import Candidate
from router_client.prompt import Prompt
from router_client.settings import RouterSettings

Booked = tuple[Evaluation, tuple[Reservation, ...]]
"""What was chosen, and what is reserved: the worker that answers, then the one that computes the prompt, if that is another."""


class Booker:
    """Of one router."""

    def __init__(
        self,
        fleet: CachedFleet,
        reservations: Reservations,
        leases: Leases,
        settings: RouterSettings,
        counters: RouterCounters,
        patience: Patience,
        now_us: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._reservations = reservations
        self._leases = leases
        self._settings = settings
        self._counters = counters
        self._patience = patience
        self._now_us = now_us
        self._own = MemoryReservations(now_us)
        self._breaker = Breaker()
        self._reported: dict[tuple[int, str], object] = {}

    # ------------------------------------------------------------ with the other routers

    def allows(self) -> bool:
        """May the store be asked now?"""
        return self._breaker.allows()

    def succeeded(self) -> None:
        """The store answered."""
        self._breaker.succeeded()

    def failed(self) -> None:
        """It did not."""
        self._counters.booking_failures += 1
        self._breaker.failed()

    async def look(self, pool_id: str, ask: Ask) -> Evaluation:
        """What `book` would choose now. Raises what the store raises."""
        await self._report(pool_id)
        return await self._reservations.evaluate(pool_id, ask)

    async def book(self, prompt: Prompt, ask: Ask, deadline: Deadline) -> Booked:
        """Choose and reserve in one call. Raises what the store raises, and TimeoutError; then nothing stays booked."""
        pool_id = prompt.scope.pool_id
        await self._report(pool_id)
        booking = self._booking(prompt, ask, leased=self._reservations.fed_by_indexer)
        ids = [id for id in (booking.id, booking.prefill_id) if id is not None]
        answered = False
        try:
            weighing = await deadline.keep(self._reservations.book(pool_id, booking))
            answered = True
        finally:
            if not answered:  # it may have been made all the same, or be made yet
                for id in ids:
                    self._leases.later(pool_id, id, Outcome.CALLED_OFF)
        if weighing is None:
            raise Unreachable(f"reservation {booking.id.hex()} was called off before it was made")
        made = ids if weighing.prefill is not None else ids[:1]
        return weighing, tuple(
            Reservation(pool_id, id, self._reservations, self._leases, self._settings.deadline_ms, self._patience)
            for id in made
        )

    # ------------------------------------------------------------ alone

    def look_alone(self, pool_id: str, ask: Ask) -> Evaluation:
        """By loads as last read, and this router's own bookings."""
        if reports := self._reports(pool_id, self._own):
            self._own.report_now(pool_id, reports)
        return self._own.evaluate_now(pool_id, ask)

    def book_alone(self, prompt: Prompt, ask: Ask) -> tuple[Reservation, ...]:
        """Reserve what `look_alone` chooses."""
        pool_id = prompt.scope.pool_id
        booking = self._booking(prompt, ask, leased=False)
        weighing = self._own.book_now(pool_id, booking)
        ids = [booking.id]
        if weighing is not None and weighing.prefill is not None and booking.prefill_id is not None:
            ids.append(booking.prefill_id)
        return tuple(Reservation(pool_id, id, self._own, None, None, self._patience) for id in ids)

    # ------------------------------------------------------------ pieces

    def _booking(self, prompt: Prompt, ask: Ask, *, leased: bool) -> Booking:
        longest_us = round(self._settings.booking.longest_s * 1e6)
        # in this process no lease is needed: a reservation ends with the process at the latest
        lease_us = self._leases.lease_us if leased else longest_us
        prefill_id = None if ask.pair_layout is None else token_bytes(ID_BYTES)
        id = token_bytes(ID_BYTES)
        return Booking(id, self._leases.router_id, prompt.input_tokens, ask, lease_us, longest_us, prefill_id)

    async def _report(self, pool_id: str) -> None:
        """Tell reservations that hear nothing of the fleet what was read of it."""
        reservations = self._reservations
        if not reservations.fed_by_indexer and (reports := self._reports(pool_id, reservations)):
            await reservations.report(pool_id, reports)

    def _reports(self, pool_id: str, to: Reservations) -> dict[str, WorkerReport]:
        pool, key = self._fleet.last(pool_id), (id(to), pool_id)
        if pool is None or self._reported.get(key) is pool:
            return {}
        self._reported[key] = pool
        now_us = self._now_us()
        return {worker_id: WorkerReport.of(record, now_us) for worker_id, record in pool.records.items()}


def unbooked(ask: Ask, candidates: Sequence[Candidate]) -> Evaluation:
    """By reported load alone; `candidates` are those of the ask's offers."""
    busy = {c.id: WorkerLoad(c.load if c.load_known else None, Load()) for c in candidates}
    return evaluate(ask, busy, (), 0)
