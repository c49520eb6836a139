"""Deciding: overlap, cost, booking; and what is done instead where the store is slow or away."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvatlas.request import SelectionResult
from kvatlas.reservations import Ask, Evaluation, Reservations
from router_client.booking.ask import ask_of
from router_client.booking.booker import Booked, Booker, unbooked
from router_client.booking.leases import Leases
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.fail_open import FAILING, Basis, Deadline, Patience
from router_client.decision.fleet_cache import CachedFleet
from router_client.decision.sight import Seen, Sight
from router_client.pricing.overlap import Lookup, OverlapIndex
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairProspects, PairRanking, pair_prospects
from router_client.pricing.quotes import Prospect, prospects, rendezvous
from router_client.pricing.ranking import Judging, Ranked
from router_client.pricing.surcharges import surcharged
from router_client.prompt import Prompt
from router_client.settings import RouterSettings, SloMode

T = TypeVar("T")

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
class PairDecision:
    """`ranking` None: nobody may get the prompt. `booked`: the reservation of who answers, then that of the prefill. No other
    policy is followed, so there is none that cost would choose instead."""

    pool: Pool
    ranking: PairRanking | None
    basis: Basis = Basis.COST
    why: str = ""
    booked: tuple[Reservation, ...] = ()
    would_be: None = None


class Decider:
    """Decides for one router."""

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
        self.patience = Patience()
        self.sight = Sight(index, fleet, counters, load_only=settings.load_only)
        self._fleet = fleet
        self._settings = settings
        self._booker = Booker(fleet, reservations, leases, settings, counters, self.patience, now_us)
        self._seed = settings.seed.to_bytes(8, "little", signed=True) if settings.seed else b""

    async def pool(self, pool_id: str) -> Pool:
        """Within the deadline: as last read, where the store is slow or away. Raises Unreachable where it never was."""
        return await self.sight.pool(pool_id, Deadline(self._settings.deadline_ms, self.patience), asks=True)

    async def rank(self, prompt: Prompt) -> Decision:
        """Every candidate. Raises what the store raises."""
        pool = self._narrowed(await self._fleet.pool(prompt.scope.pool_id), prompt)
        found = await self.sight.look_up(prompt, pool)
        offered, weighing = await self._looked(prompt, pool, found)
        if weighing is None:
            return Decision(pool, ())
        return self._decision(prompt, Seen(pool, found, Basis.COST, ""), offered, weighing)

    async def predicted(self, prompt: Prompt, pool: Pool, found: Lookup) -> dict[str, int]:
        """By worker, the tokens that `rank` would predict it to hold beside what was found. Raises what the store raises."""
        offered, weighing = await self._looked(prompt, self._narrowed(pool, prompt), found)
        if weighing is None:
            return {}
        return {
            prospect.id: seen.predicted_tokens - prospect.cached_tokens
            for prospect, seen in zip(offered, weighing.by_offer, strict=True)
            if seen.predicted_tokens
        }

    async def decide(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> Decision:
        """The worker to use, reserved if asked for.

        Within the deadline, whatever the store does. Raises Unreachable where the pool was never read.
        """
        deadline, asks, seen = await self._seen(prompt, avoid)
        pool = seen.pool
        offered = self._prospects(prompt, pool, seen.found)
        if not offered:
            return Decision(pool, ())
        followed = self._followed(prompt, pool)
        ask = ask_of(prompt, offered, seen.found.chains, self._settings)
        if not self._settings.booking.reservations:
            return self._decision(prompt, seen, offered, _unbooked(ask, offered), followed)
        if asks:
            answer = self._shared(prompt, seen, offered, ask, followed, book, deadline)
            decision, failure = await self._answered(answer, deadline)
            if decision is not None:
                return decision
            seen = replace(seen, why=seen.why or failure)
        return self._alone(prompt, seen, offered, ask, followed, book)

    async def decide_pair(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> PairDecision:
        """The workers to use, both reserved in one call if asked for; see `decide`. No other policy is followed."""
        deadline, asks, seen = await self._seen(prompt, avoid)
        pairs = self._pairs(prompt, seen.pool, seen.found)
        if not pairs.possible:
            return PairDecision(seen.pool, None)
        everyone, why = pairs.everyone, seen.why
        ask = pairs.ask(ask_of(prompt, everyone, seen.found.chains, self._settings))
        weighed: Booked | None = None
        if not self._settings.booking.reservations:
            weighed = _unbooked(ask, everyone), ()
        elif asks:
            weighed, failure = await self._answered(self._weighed(prompt, ask, book, deadline), deadline)
            why = why or failure
        if weighed is None:
            weighing = self._booker.look_alone(prompt.scope.pool_id, ask)
            weighed = weighing, self._booker.book_alone(prompt, ask) if book else ()
        ranking = PairRanking(pairs, weighed[0], judging_of(prompt, self._settings))
        return PairDecision(seen.pool, ranking, seen.basis, why, weighed[1])

    # ------------------------------------------------------------ with the other routers, and alone

    async def _answered(self, answer: Coroutine[Any, Any, T], deadline: Deadline) -> tuple[T | None, str]:
        """What reservations answer; None, and why, where they do not."""
        try:
            found = await answer
        except FAILING as error:
            self._booker.failed()
            return None, f"reservations: {deadline.why(error)}"
        self._booker.succeeded()
        return found, ""

    async def _weighed(self, prompt: Prompt, ask: Ask, book: bool, deadline: Deadline) -> Booked:
        """In one call. Raises what the store raises, and TimeoutError."""
        if book:
            return await self._booker.book(prompt, ask, deadline)
        return await deadline.keep(self._booker.look(prompt.scope.pool_id, ask)), ()

    async def _shared(
        self,
        prompt: Prompt,
        seen: Seen,
        offered: list[Prospect],
        ask: Ask,
        followed: str | None,
        book: bool,
        deadline: Deadline,
    ) -> Decision:
        weighing, booked = await self._weighed(prompt, ask, book and followed is None, deadline)
        decision = self._decision(prompt, seen, offered, weighing, followed)
        if book and followed is not None:
            _, booked = await self._booker.book(prompt, _only(ask, decision.worker_id), deadline)
        return replace(decision, reservation=booked[0]) if booked else decision

    def _alone(
        self, prompt: Prompt, seen: Seen, offered: list[Prospect], ask: Ask, followed: str | None, book: bool
    ) -> Decision:
        """By what this router knows by itself: loads as last read, and its own bookings."""
        weighing = self._booker.look_alone(prompt.scope.pool_id, ask)
        if seen.basis is not Basis.COST and not any(weighed.load_known for weighed in weighing.by_offer):
            seen = replace(seen, basis=Basis.PREFIX_HASH)
            weighing = replace(weighing, chosen=self._by_prefix(offered, seen.found))
        decision = self._decision(prompt, seen, offered, weighing, followed)
        if not book:
            return decision
        return replace(decision, reservation=self._booker.book_alone(prompt, _only(ask, decision.worker_id))[0])

    async def _looked(self, prompt: Prompt, pool: Pool, found: Lookup) -> tuple[list[Prospect], Evaluation | None]:
        """Every candidate, and what it is judged by now; None without a candidate. Raises what the store raises."""
        offered = self._prospects(prompt, pool, found)
        if not offered:
            return offered, None
        ask = ask_of(prompt, offered, found.chains, self._settings)
        if not self._settings.booking.reservations:
            return offered, _unbooked(ask, offered)
        return offered, await self._booker.look(prompt.scope.pool_id, ask)

    # ------------------------------------------------------------ pieces

    async def _seen(self, prompt: Prompt, avoid: Collection[str]) -> tuple[Deadline, bool, Seen]:
        """What is known before load, within a deadline that has begun; and whether reservations may be asked."""
        deadline = Deadline(self._settings.deadline_ms, self.patience)
        asks = self._booker.allows()
        pool = self._narrowed(await self.sight.pool(prompt.scope.pool_id, deadline, asks=asks), prompt, avoid)
        return deadline, asks, await self.sight.see(prompt, pool, deadline)

    def _narrowed(self, pool: Pool, prompt: Prompt, avoid: Collection[str] = ()) -> Pool:
        if avoid:
            pool = pool.without(avoid)
        for select in (self._settings.select, prompt.select):
            if select is not None:
                pool = pool.narrowed(select.why_not)
        return pool

    def _prospects(self, prompt: Prompt, pool: Pool, found: Lookup) -> list[Prospect]:
        fingerprint = found.fingerprint + self._seed
        offered = prospects(prompt, pool, found.held, fingerprint=fingerprint)
        return self._surcharged(prompt, offered, fingerprint)

    def _surcharged(self, prompt: Prompt, offered: list[Prospect], fingerprint: bytes) -> list[Prospect]:
        settings = self._settings
        if not (settings.temperature or (settings.session_us and prompt.session_id)):
            return offered
        return surcharged(
            offered,
            fingerprint,
            session_id=prompt.session_id,
            session_us=settings.session_us,
            temperature=settings.temperature,
        )

    def _pairs(self, prompt: Prompt, pool: Pool, found: Lookup) -> PairProspects:
        fingerprint, least = found.fingerprint + self._seed, self._settings.pairs.least_new_tokens
        pairs = pair_prospects(prompt, pool, found.held, fingerprint=fingerprint, least_new_tokens=least)
        return pairs.surcharged(lambda answering: self._surcharged(prompt, answering, fingerprint))

    def _followed(self, prompt: Prompt, pool: Pool) -> str | None:
        """Whom another policy chooses; one that chooses nobody who may get it is not followed."""
        if self._settings.follow is None:
            return None
        endpoints = [candidate.endpoint for candidate in pool.candidates]
        followed = self._settings.follow.choose(prompt, endpoints)
        return followed if any(endpoint.id == followed for endpoint in endpoints) else None

    def _decision(
        self,
        prompt: Prompt,
        seen: Seen,
        offered: Sequence[Prospect],
        weighing: Evaluation,
        followed: str | None = None,
    ) -> Decision:
        judging = judging_of(prompt, self._settings)
        results = Ranked(offered, weighing.by_offer, chosen=weighing.chosen, judging=judging)
        best = results[0].worker_id
        if followed is not None:
            return Decision(seen.pool, results, followed, Basis.POLICY, f"cost would choose {best}", best)
        return Decision(seen.pool, results, best, seen.basis, seen.why)

    def _by_prefix(self, offered: Sequence[Prospect], found: Lookup) -> int:
        """Where prompts go that begin like this one, so that what they share is cached once."""
        size = min(found.chains, default=0)
        start = found.chains[size].start(max(1, PREFIX_TOKENS // size)) if size else found.fingerprint
        return max(range(len(offered)), key=lambda i: rendezvous(start + self._seed, offered[i].id))


def judging_of(prompt: Prompt, settings: RouterSettings) -> Judging:
    """As `ask_of` asks."""
    limits = settings.limits
    factor = limits.slo_factor if limits.slo is SloMode.PENALTY else 0.0
    return Judging(prompt.slo, settings.booking.again_factor, factor, limits.slo is SloMode.FILTER)


def _unbooked(ask: Ask, offered: Sequence[Prospect]) -> Evaluation:
    return unbooked(ask, [prospect.candidate for prospect in offered])


def _only(ask: Ask, worker_id: str) -> Ask:
    """An ask for one of its workers, whatever limits it is over."""
    return replace(ask, offers=[offer for offer in ask.offers if offer.worker_id == worker_id], limits=None)
