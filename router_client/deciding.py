"""Deciding: overlap, cost, booking; and what is done instead where the store is slow or away."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from secrets import token_bytes

from kvatlas.errors import Unreachable
from kvatlas.request import SelectionResult
from kvatlas.reservations import (
    Ask,
    Booking,
    MemoryReservations,
    Outcome,
    Reservations,
    Weighed,
    Weighing,
    WorkerReport,
)
from kvatlas.reservations.protocol import ID_BYTES
from router_client.asking import ask_of
from router_client.counters import RouterCounters
from router_client.fail_open import FAILING, Basis, Breaker, Deadline, Patience
from router_client.fleet import CachedFleet
from router_client.leases import Leases
from router_client.lookup import Lookup, OverlapIndex, look_up, without_index
from router_client.pool import Pool
from router_client.prompt import Prompt
from router_client.ranking import Prospect, Ranked, prospects, rendezvous
from router_client.reservation import Reservation
from router_client.settings import RouterSettings

INDEX_SHARE = 0.6
"""How much of the time of a decision the index may take, so that some is left to book."""

PREFIX_TOKENS = 1_024
"""Without load and index, prompts go together that share so many tokens at their start."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`results` cheapest first, empty where nobody may get the prompt; `worker_id` is the one that is to be used."""

    pool: Pool
    results: Sequence[SelectionResult]
    worker_id: str = ""
    basis: Basis = Basis.COST
    why: str = ""
    would_be: str | None = None
    reservation: Reservation | None = None

    @property
    def result(self) -> SelectionResult:
        first = self.results[0]
        if first.worker_id == self.worker_id:
            return first
        return next(result for result in self.results if result.worker_id == self.worker_id)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a prompt before load: `why` the index is not in it."""

    pool: Pool
    found: Lookup
    basis: Basis
    why: str


class Decider:
    """Decides for one router. `load_only` may be switched at any time."""

    def __init__(
        self,
        index: OverlapIndex,
        fleet: CachedFleet,
        reservations: Reservations,
        leases: Leases,
        settings: RouterSettings,
        counters: RouterCounters,
        now_us: Callable[[], int],
    ) -> None:
        self.load_only = settings.load_only
        self.patience = Patience()
        self._index = index
        self._fleet = fleet
        self._reservations = reservations
        self._leases = leases
        self._settings = settings
        self._counters = counters
        self._now_us = now_us
        self._own = MemoryReservations(now_us)
        self._index_breaker = Breaker()
        self._booking_breaker = Breaker()
        self._reported: dict[tuple[int, str], Pool] = {}
        self._seed = settings.seed.to_bytes(8, "little", signed=True) if settings.seed else b""

    async def rank(self, prompt: Prompt) -> Decision:
        """Every candidate. Raises what the store raises."""
        pool = await self._fleet.pool(prompt.scope.pool_id)
        found = await self._look_up(prompt, pool)
        offered = self._prospects(prompt, pool, found)
        weighing = await self._look(prompt, offered, found) if offered else None
        return self._decision(_Seen(pool, found, Basis.COST, ""), offered, weighing)

    async def decide(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> Decision:
        """The worker to use, reserved if asked for.

        Within the deadline, whatever the store does. Raises Unreachable where the pool was never read.
        """
        deadline = Deadline(self._settings.deadline_ms, self.patience)
        asks = self._booking_breaker.allows()
        pool = await self._pool(prompt.scope.pool_id, deadline, asks)
        if avoid:
            pool = pool.without(avoid)
        seen = await self._see(prompt, pool, deadline)
        offered = self._prospects(prompt, pool, seen.found)
        if not offered:
            return Decision(pool, ())
        followed: str | None = None
        if self._settings.follow is not None:
            endpoints = [candidate.endpoint for candidate in pool.candidates]
            followed = self._settings.follow.choose(prompt, endpoints)
            if all(endpoint.id != followed for endpoint in endpoints):
                followed = None  # a policy that chooses nobody who may get it is not followed
        booked = book and self._settings.booking.reservations
        if not self._settings.booking.reservations:
            weighed = [Weighed(p.candidate.load, p.candidate.load_known) for p in offered]
            return self._decision(seen, offered, Weighing(self._first(offered, weighed), weighed), followed)
        if asks:
            try:
                decision = await self._shared(prompt, seen, offered, followed, booked, deadline)
            except FAILING as error:
                self._counters.booking_failures += 1
                self._booking_breaker.failed()
                seen = replace(seen, why=seen.why or f"reservations: {deadline.why(error)}")
            else:
                self._booking_breaker.succeeded()
                return decision
        return self._alone(prompt, seen, offered, followed, booked)

    # ------------------------------------------------------------ what is known

    async def pool(self, pool_id: str) -> Pool:
        """Within the deadline: as last read, where the store is slow or away. Raises Unreachable where it never was."""
        return await self._pool(pool_id, Deadline(self._settings.deadline_ms, self.patience), True)

    async def _pool(self, pool_id: str, deadline: Deadline, asks: bool) -> Pool:
        known = self._fleet.last(pool_id)
        if known is None:  # there is nothing to decide with before it is read
            return await self._fleet.pool(pool_id)
        if not asks:
            return known
        try:
            return await deadline.keep(self._fleet.pool(pool_id), INDEX_SHARE)
        except FAILING:
            return self._fleet.last(pool_id) or known

    async def _see(self, prompt: Prompt, pool: Pool, deadline: Deadline) -> _Seen:
        """What the index holds, or why it was not asked or did not answer."""
        if self.load_only:
            why = "the router is switched to load alone"
        elif not self._index_breaker.allows():
            why = "index: no answer lately"
        else:
            try:
                found = await deadline.keep(self._look_up(prompt, pool), INDEX_SHARE)
            except FAILING as error:
                self._counters.index_failures += 1
                self._index_breaker.failed()
                why = f"index: {deadline.why(error)}"
            else:
                self._index_breaker.succeeded()
                return _Seen(pool, found, Basis.COST, "")
        return _Seen(pool, without_index(prompt, pool.groups), Basis.LOAD, why)

    async def _look_up(self, prompt: Prompt, pool: Pool) -> Lookup:
        found = await look_up(self._index, prompt, pool.groups)
        self._counters.lookups += found.round_trips
        return found

    def _prospects(self, prompt: Prompt, pool: Pool, found: Lookup) -> list[Prospect]:
        fingerprint = found.fingerprint + self._seed
        return prospects(prompt, pool, found.held, self._settings.profile, fingerprint=fingerprint)

    # ------------------------------------------------------------ with the other routers, and alone

    async def _look(self, prompt: Prompt, offered: list[Prospect], found: Lookup) -> Weighing:
        if not self._settings.booking.reservations:
            weighed = [Weighed(p.candidate.load, p.candidate.load_known) for p in offered]
            return Weighing(self._first(offered, weighed), weighed)
        await self._report(prompt.scope.pool_id, self._reservations)
        return await self._reservations.look(prompt.scope.pool_id, self._ask(prompt, offered, found))

    async def _shared(
        self,
        prompt: Prompt,
        seen: _Seen,
        offered: list[Prospect],
        followed: str | None,
        book: bool,
        deadline: Deadline,
    ) -> Decision:
        pool_id = prompt.scope.pool_id
        await self._report(pool_id, self._reservations)
        ask = self._ask(prompt, offered, seen.found)
        if not book or followed is not None:
            weighing = await deadline.keep(self._reservations.look(pool_id, ask))
            decision = self._decision(seen, offered, weighing, followed)
            if not book:
                return decision
            offers = [offer for offer in ask.offers if offer.worker_id == followed]
            id, _ = await self._book(prompt, replace(ask, offers=offers), deadline)
        else:
            id, weighing = await self._book(prompt, ask, deadline)
            decision = self._decision(seen, offered, weighing)
        reservation = self._reservation(pool_id, id, self._leases)
        return replace(decision, reservation=reservation)

    async def _book(self, prompt: Prompt, ask: Ask, deadline: Deadline) -> tuple[bytes, Weighing]:
        booking = self._booking(prompt, ask, leased=self._reservations.hears_fleet)
        answered = False
        try:
            weighing = await deadline.keep(self._reservations.book(prompt.scope.pool_id, booking))
            answered = True
        finally:
            if not answered:  # it may have been made all the same, or be made yet
                self._leases.later(prompt.scope.pool_id, booking.id, Outcome.CALLED_OFF)
        if weighing is None:
            raise Unreachable(f"reservation {booking.id.hex()} was called off before it was made")
        return booking.id, weighing

    def _alone(
        self, prompt: Prompt, seen: _Seen, offered: list[Prospect], followed: str | None, book: bool
    ) -> Decision:
        """By what this router knows by itself: loads as last read, and its own bookings."""
        pool_id = prompt.scope.pool_id
        self._report_now(pool_id, self._own)
        ask = self._ask(prompt, offered, seen.found)
        weighing = self._own.look_now(pool_id, ask)
        if seen.basis is not Basis.COST and not any(weighed.load_known for weighed in weighing.weighed):
            seen = replace(seen, basis=Basis.PREFIX_HASH)
            weighing = replace(weighing, chosen=self._by_prefix(offered, seen.found))
        decision = self._decision(seen, offered, weighing, followed)
        if not book:
            return decision
        chosen = replace(ask, offers=[offer for offer in ask.offers if offer.worker_id == decision.worker_id])
        booking = self._booking(prompt, chosen, leased=False)
        self._own.book_now(pool_id, booking)
        return replace(decision, reservation=self._reservation(pool_id, booking.id, None))

    # ------------------------------------------------------------ pieces

    def _ask(self, prompt: Prompt, offered: Sequence[Prospect], found: Lookup) -> Ask:
        return ask_of(prompt, offered, found.chains, self._settings.profile, self._settings.booking)

    def _booking(self, prompt: Prompt, ask: Ask, *, leased: bool) -> Booking:
        longest_us = round(self._settings.booking.longest_s * 1e6)
        # in this process no lease is needed: a reservation ends with the process at the latest
        lease_us = self._leases.lease_us if leased else longest_us
        id = token_bytes(ID_BYTES)
        return Booking(id, self._leases.router_id, prompt.input_tokens, ask, lease_us, longest_us)

    def _reservation(self, pool_id: str, id: bytes, leases: Leases | None) -> Reservation:
        """`leases` None: it is one of this router's own."""
        if leases is None:
            return Reservation(pool_id, id, self._own, None, None, self.patience)
        return Reservation(pool_id, id, self._reservations, leases, self._settings.deadline_ms, self.patience)

    def _decision(
        self, seen: _Seen, offered: Sequence[Prospect], weighing: Weighing | None, followed: str | None = None
    ) -> Decision:
        if weighing is None:
            return Decision(seen.pool, ())
        factor = self._settings.booking.again_factor
        results = Ranked(offered, weighing.weighed, self._settings.profile, chosen=weighing.chosen, again_factor=factor)
        best = results[0].worker_id
        if followed is not None:
            return Decision(seen.pool, results, followed, Basis.POLICY, f"cost would choose {best}", best)
        return Decision(seen.pool, results, best, seen.basis, seen.why)

    def _by_prefix(self, offered: Sequence[Prospect], found: Lookup) -> int:
        """Where prompts go that begin like this one, so that what they share is cached once."""
        size = min(found.chains, default=0)
        start = found.chains[size].start(max(1, PREFIX_TOKENS // size)) if size else found.fingerprint
        return max(range(len(offered)), key=lambda i: rendezvous(start + self._seed, offered[i].id))

    def _first(self, offered: Sequence[Prospect], weighed: Sequence[Weighed]) -> int:
        results = Ranked(offered, weighed, self._settings.profile)
        return next(i for i, prospect in enumerate(offered) if prospect.id == results[0].worker_id)

    async def _report(self, pool_id: str, reservations: Reservations) -> None:
        """Tell reservations that hear nothing of the fleet what was read of it."""
        if not reservations.hears_fleet and (reports := self._reports(pool_id, id(reservations))):
            await reservations.report(pool_id, reports)

    def _report_now(self, pool_id: str, reservations: MemoryReservations) -> None:
        if reports := self._reports(pool_id, id(reservations)):
            reservations.report_now(pool_id, reports)

    def _reports(self, pool_id: str, to: int) -> dict[str, WorkerReport]:
        pool = self._fleet.last(pool_id)
        if pool is None or self._reported.get((to, pool_id)) is pool:
            return {}
        self._reported[to, pool_id] = pool
        now_us = self._now_us()
        return {worker_id: WorkerReport.of(record, now_us) for worker_id, record in pool.records.items()}
