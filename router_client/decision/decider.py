"""The steps of one choice: read the pool, look up the overlap, price the candidates, book the cheapest under load.

Each step has a file of its own (`fleet_cache`, `index_lookup`, `policy`, `router_client.booking.booker`), and all share
one deadline. If the store is slow or away, the step goes on without it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvatlas.errors import Unreachable
from kvatlas.request import SelectionResult
from kvatlas.reservations import Ask, Evaluation, LookAlikesUnknown, Outcome, Reservations
from kvatlas.store.deadline import STORE_FAILURES, Deadline, LateCalls
from router_client.basis import Basis
from router_client.booking.booker import Booker, BookingResult, evaluate_without_bookings
from router_client.booking.leases import Leases
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.index_lookup import IndexLookup, Situation
from router_client.decision.policy import RoutingPolicy
from router_client.fleet_cache import FleetCache
from router_client.pricing.look_alikes import LookAlikeQuotes
from router_client.pricing.overlap import OverlapIndex, PromptLookup
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairRanking
from router_client.pricing.quotes import Quote
from router_client.pricing.ranking import RankedResults
from router_client.prompt import Prompt
from router_client.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class Decision:
    """`results` cheapest first, empty if no worker may get the prompt. `worker_id`: the worker to use.

    `unread`: how many more candidates there are, which cost no less. `index`: who said what the workers hold, if the
    router has a replica of the index.
    """

    pool: Pool
    results: Sequence[SelectionResult]
    worker_id: str = ""
    basis: Basis = Basis.COST
    why: str = ""
    would_be: str | None = None
    reservation: Reservation | None = None
    unread: int = 0
    index: str = ""

    @property
    def result(self) -> SelectionResult:
        """The result of the worker to use."""
        first = self.results[0]
        if first.worker_id == self.worker_id:
            return first
        return next(result for result in self.results if result.worker_id == self.worker_id)


@dataclass(frozen=True, slots=True)
class PairDecision:
    """`ranking` None: no worker may get the prompt. `reservations`: the worker that answers, then the prefill worker.

    Pairs follow no other policy, so `would_be` is always None.
    """

    pool: Pool
    ranking: PairRanking | None
    basis: Basis = Basis.COST
    why: str = ""
    reservations: tuple[Reservation, ...] = ()
    would_be: None = None
    index: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt whose candidates are priced without load. `followed`: the worker that another policy chose."""

    prompt: Prompt
    situation: Situation
    quotes: Sequence[Quote]
    ask: Ask
    followed: str | None = None


class Decider:
    """Decides for one router."""

    def __init__(
        self,
        index: OverlapIndex,
        fleet: FleetCache,
        reservations: Reservations,
        leases: Leases,
        settings: RouterSettings,
        counters: RouterCounters,
        now_us: Callable[[], int],
    ) -> None:
        self.late_calls = LateCalls()
        self.index = IndexLookup(index, counters, load_only=settings.load_only)
        self._fleet = fleet
        self._settings = settings
        self._counters = counters
        self._policy = RoutingPolicy(settings)
        self._booker = Booker(fleet, reservations, leases, settings, counters, self.late_calls, now_us)

    async def read_pool(self, pool_id: str) -> Pool:
        """Within the deadline, else as last read. Raises Unreachable if it never was."""
        pool, _ = await self._read_pool(pool_id, self._start_deadline(), call_store=True)
        return pool

    async def rank(self, prompt: Prompt) -> Decision:
        """Every candidate. Raises what the store raises."""
        pool = self._policy.narrow(await self._fleet.read_pool(prompt.scope.pool_id), prompt)
        case = self._price(prompt, Situation(pool, await self.index.look_up(prompt, pool)))
        return Decision(pool, ()) if case is None else self._decide(case, await self._look(case))

    async def predict_tokens(self, prompt: Prompt, pool: Pool, lookup: PromptLookup) -> dict[str, int]:
        """By worker, the tokens that `rank` would predict it to hold beyond the lookup. Raises what the store raises."""
        case = self._price(prompt, Situation(self._policy.narrow(pool, prompt), lookup))
        if case is None:
            return {}
        evaluation = await self._look(case)
        return {
            quote.id: evaluated.predicted_tokens - quote.cached_tokens
            for quote, evaluated in zip(case.quotes, evaluation.by_offer, strict=True)
            if evaluated.predicted_tokens
        }

    async def decide(
        self, prompt: Prompt, avoid: Collection[str], *, book: bool, explain_all: bool = False
    ) -> Decision:
        """The worker to use, reserved if `book`. `explain_all`: read every candidate.

        Within the deadline, whatever the store does. Raises Unreachable if the pool was never read.
        """
        deadline, call_store = self._start_deadline(), self._booker.may_call_store()
        situation = await self._read_situation(prompt, avoid, deadline, call_store=call_store)
        if call_store and not explain_all and self._booker.sorts_workers:
            quotes = self._policy.quote_look_alikes(prompt, situation.pool, situation.lookup)
            if quotes is not None:
                call = self._decide_among_look_alikes(prompt, situation, quotes, deadline, book=book)
                decision, failure = await self._booker.try_store(call, deadline)
                if decision is not None:
                    return decision
                situation = replace(situation, why=situation.why or failure)
                call_store = not failure  # without one, the store does not know these look-alikes
        case = self._price(prompt, situation, follow=True)
        if case is None:
            return Decision(situation.pool, ())
        if not self._settings.booking.reservations:
            return self._decide(case, evaluate_without_bookings(case.ask, case.situation.pool, case.quotes))
        failure = "reservations: no answer lately"
        if call_store:
            call = self._decide_in_store(case, deadline, book=book)
            decision, failure = await self._booker.try_store(call, deadline)
            if decision is not None:
                return decision
        case = replace(case, situation=replace(situation, why=situation.why or failure))
        return self._decide_alone(case, book=book)

    async def decide_pair(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> PairDecision:
        """The workers to use, reserved in one call if `book`; see `decide`. No other policy is followed."""
        deadline, call_store = self._start_deadline(), self._booker.may_call_store()
        situation = await self._read_situation(prompt, avoid, deadline, call_store=call_store)
        pairs = self._policy.quote_pairs(prompt, situation.pool, situation.lookup)
        if not pairs.can_serve:
            return PairDecision(situation.pool, None)
        quotes, why = pairs.all_quotes, situation.why
        ask = pairs.to_pair_ask(self._policy.ask(prompt, situation.pool, quotes, situation.lookup))
        result: BookingResult | None = None
        if not self._settings.booking.reservations:
            result = BookingResult(evaluate_without_bookings(ask, situation.pool, quotes))
        elif call_store:
            call = self._booker.look_or_book(prompt, ask, deadline, book=book)
            result, failure = await self._booker.try_store(call, deadline)
            why = why or failure
        if result is None:
            evaluation = self._booker.look_alone(prompt.scope.pool_id, ask)
            result = BookingResult(evaluation, self._booker.book_alone(prompt, ask) if book else ())
        ranking = PairRanking(pairs, result.evaluation, self._policy.criteria(prompt))
        return PairDecision(
            situation.pool, ranking, situation.basis, why, result.reservations, index=situation.lookup.source
        )

    # ------------------------------------------------------------ steps

    def _start_deadline(self) -> Deadline:
        least_ms, most_ms = self._settings.deadline_ms, self._settings.most_deadline_ms
        if least_ms is None:
            return Deadline(None, self.late_calls)
        return Deadline(self.late_calls.latency.deadline_ms(least_ms, most_ms), self.late_calls)

    async def _read_situation(
        self, prompt: Prompt, avoid: Collection[str], deadline: Deadline, *, call_store: bool
    ) -> Situation:
        pool, why = await self._read_pool(prompt.scope.pool_id, deadline, call_store=call_store)
        situation = await self.index.look_up_in_time(prompt, self._policy.narrow(pool, prompt, avoid), deadline)
        return replace(situation, why=why) if why and not situation.why else situation

    async def _read_pool(self, pool_id: str, deadline: Deadline, *, call_store: bool) -> tuple[Pool, str]:
        pool, why = await self._fleet.read_pool_in_time(pool_id, deadline, call_store=call_store)
        self._counters.fleet_failures += bool(why)
        return pool, why

    def _price(self, prompt: Prompt, situation: Situation, *, follow: bool = False) -> _Case | None:
        """None without a candidate."""
        quotes = self._policy.quote(prompt, situation.pool, situation.lookup)
        if not quotes:
            return None
        followed = self._policy.choose_followed(prompt, situation.pool) if follow else None
        return _Case(
            prompt, situation, quotes, self._policy.ask(prompt, situation.pool, quotes, situation.lookup), followed
        )

    async def _look(self, case: _Case) -> Evaluation:
        """Under load, as it is now; nothing is booked. Raises what the store raises."""
        if not self._settings.booking.reservations:
            return evaluate_without_bookings(case.ask, case.situation.pool, case.quotes)
        return await self._booker.look(case.prompt.scope.pool_id, case.ask)

    async def _decide_in_store(self, case: _Case, deadline: Deadline, *, book: bool) -> Decision:
        """With all other routers' bookings. Raises what the store raises, and TimeoutError."""
        book_cheapest = book and case.followed is None
        evaluation, reservations = await self._booker.look_or_book(case.prompt, case.ask, deadline, book=book_cheapest)
        decision = self._decide(case, evaluation)
        if book and case.followed is not None:
            ask = _narrow_ask(case.ask, decision.worker_id)
            _, reservations = await self._booker.book(case.prompt, ask, deadline)
        return replace(decision, reservation=reservations[0]) if reservations else decision

    async def _decide_among_look_alikes(
        self, prompt: Prompt, situation: Situation, quotes: LookAlikeQuotes, deadline: Deadline, *, book: bool
    ) -> Decision | None:
        """The same, reading few workers; None if the store knows too few of them. Raises what the store raises, and
        TimeoutError."""
        ask = self._policy.ask_look_alikes(prompt, quotes, situation.lookup)
        try:
            evaluation, reservations = await self._booker.look_or_book(prompt, ask, deadline, book=book)
        except LookAlikesUnknown:
            return None
        matched, by_offer, chosen = quotes.match(evaluation)
        if chosen is None:
            # the worker is newer than the pool as read here
            with suppress(*STORE_FAILURES):  # without a new reading, the choice fails below
                pool = await deadline.wait_for(self._fleet.read_again(prompt.scope.pool_id))
                quotes = replace(quotes, pool=pool)
                matched, by_offer, chosen = quotes.match(evaluation)
        if chosen is None:
            for reservation in reservations:
                await reservation.end(Outcome.FAILED)
            raise Unreachable(f"worker {evaluation.worker_id} was chosen, but has no fleet record that can be read")
        results = RankedResults(matched, by_offer, chosen=chosen, criteria=self._policy.criteria(prompt))
        return Decision(
            quotes.pool,
            results,
            evaluation.worker_id,
            situation.basis,
            situation.why,
            reservation=reservations[0] if reservations else None,
            unread=len(quotes.pool.candidates) - len(matched),
            index=situation.lookup.source,
        )

    def _decide_alone(self, case: _Case, *, book: bool) -> Decision:
        """By what this router knows itself: loads as last read, and its own bookings."""
        evaluation = self._booker.look_alone(case.prompt.scope.pool_id, case.ask)
        situation = case.situation
        if situation.basis is not Basis.COST and not any(evaluated.load_known for evaluated in evaluation.by_offer):
            case = replace(case, situation=replace(situation, basis=Basis.PREFIX_HASH))
            evaluation = replace(evaluation, chosen=self._policy.choose_by_prefix(case.quotes, situation.lookup))
        decision = self._decide(case, evaluation)
        if not book:
            return decision
        (reservation,) = self._booker.book_alone(case.prompt, _narrow_ask(case.ask, decision.worker_id))
        return replace(decision, reservation=reservation)

    def _decide(self, case: _Case, evaluation: Evaluation) -> Decision:
        """The followed worker, if there is one, else the evaluation's choice."""
        situation, criteria = case.situation, self._policy.criteria(case.prompt)
        results = RankedResults(case.quotes, evaluation.by_offer, chosen=evaluation.chosen, criteria=criteria)
        best = results[0].worker_id
        if case.followed is not None:
            why = f"cost would choose {best}"
            return Decision(
                situation.pool, results, case.followed, Basis.POLICY, why, best, index=situation.lookup.source
            )
        return Decision(situation.pool, results, best, situation.basis, situation.why, index=situation.lookup.source)


def _narrow_ask(ask: Ask, worker_id: str) -> Ask:
    """An ask for one of its workers, whatever limits that one is over."""
    return replace(ask, offers=[offer for offer in ask.offers if offer.worker_id == worker_id], limits=None)
