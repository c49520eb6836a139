"""The steps of one choice: read the pool, look up the overlap, price the candidates, book the cheapest under load.

Each step has its own file (`fleet_cache`, `index_lookup`, `policy`, `router_client.booking.booker`), and all share one
deadline. If the store is slow or down, the choice continues without it.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from kvatlas.errors import Unreachable
from kvatlas.identity import Scope
from kvatlas.reservations import Ask, Evaluation, LookAlikesUnknown, LookupImpossible, OfferEvaluation, Outcome
from kvatlas.store.deadline import CALLS_A_DECISION, READ_SHARE, STORE_FAILURES, Deadline, LateCalls
from kvatlas.store.distance import StoreDistance
from router_client.basis import Basis
from router_client.booking.booker import Booker, evaluate_without_bookings
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.case import Case
from router_client.decision.choice_builder import ChoiceBuilder
from router_client.decision.index_lookup import IndexLookup
from router_client.decision.named_blocks import NamedBlocks
from router_client.decision.policy import RoutingPolicy
from router_client.errors import NoWorkers
from router_client.fleet_cache import FleetCache
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.look_alikes import LookAlikeQuotes
from router_client.pricing.lookups import LookupQuotes
from router_client.pricing.overlap import PromptLookup
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairRanking
from router_client.pricing.quotes import Quote, shortlist
from router_client.pricing.ranking import RankedResults
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.results import Choice, Ranking, list_left_out
from router_client.settings import RouterSettings

APART_S = 2.0
MOST_SCOPES = 4_096
MOST_NAMED = 8
"""Limit of left-out workers that an error names."""


class Decider:
    """Decides for one router."""

    def __init__(
        self,
        index: IndexLookup,
        fleet: FleetCache,
        booker: Booker,
        builder: ChoiceBuilder,
        settings: RouterSettings,
        counters: RouterCounters,
        late_calls: LateCalls,
        distance: StoreDistance,
        named_blocks: NamedBlocks,
    ) -> None:
        self._named_blocks = named_blocks
        self._index = index
        self._fleet = fleet
        self._booker = booker
        self._builder = builder
        self._settings = settings
        self._counters = counters
        self._late_calls = late_calls
        self._distance = distance
        self._policy = RoutingPolicy(settings)
        self._apart_until: dict[Scope, float] = {}
        """Until when choices look up apart: blocks in other tiers than HBM have to be priced, one call would read too many
        workers, or the index is damaged."""

    async def read_pool(self, pool_id: str) -> Pool:
        """The pool, read within the deadline, or as last read. Raises Unreachable if it was never read."""
        pool, _ = await self._read_pool(pool_id, self._start_deadline(), call_store=True)
        return pool

    async def rank(self, prompt: Prompt) -> Ranking:
        """Rank every candidate. Raises what the store raises."""
        pool = self._policy.narrow(await self._fleet.read_pool(prompt.scope.pool_id), prompt)
        prompt = self._named_blocks.narrow(prompt, pool)
        case = Case(prompt, pool, await self._index.look_up(prompt, pool))
        quotes = shortlist(self._policy.quote(case))
        if not quotes:
            return self._builder.ranking(case, (), pool.left_out)
        evaluation = await self._look(case, quotes)
        results = self._rank(case, quotes, evaluation.by_offer, evaluation.chosen, evaluation.source)
        return self._builder.ranking(case, results, pool.left_out)

    async def predict_tokens(self, prompt: Prompt, pool: Pool, lookup: PromptLookup) -> dict[str, int]:
        """By worker, the tokens that `rank` would predict beyond the lookup. Raises what the store raises."""
        case = Case(prompt, self._policy.narrow(pool, prompt), lookup)
        quotes = shortlist(self._policy.quote(case))
        if not quotes:
            return {}
        evaluation = await self._look(case, quotes)
        return {
            quote.id: evaluated.predicted_tokens - quote.cached_tokens
            for quote, evaluated in zip(quotes, evaluation.by_offer, strict=True)
            if evaluated.predicted_tokens
        }

    async def decide(self, prompt: Prompt, avoid: Collection[str], *, book: bool, explain_all: bool = False) -> Choice:
        """Choose a worker, and reserve it if `book`. `explain_all`: read every candidate.

        Stays within the deadline, whatever the store does; naming blocks to fetch may take longer. Raises NoWorkers;
        Unreachable if the pool was never read.
        """
        return await self._name_blocks(prompt, await self._decide(prompt, avoid, book=book, explain_all=explain_all))

    async def _decide(self, prompt: Prompt, avoid: Collection[str], *, book: bool, explain_all: bool) -> Choice:
        call_store = self._booker.may_call_store()
        # nothing waits for a booking in a store that is far away, or that has failed and is being retried
        trying = book and self._booker.is_trying
        behind = call_store and (self.store_is_far or trying)
        call_store &= not trying
        deadline = self._start_deadline()
        if call_store and not behind and not explain_all and self._booker.looks_up and self._index.is_used_for(prompt):
            choice, unanswered = await self._choose_by_lookup(prompt, avoid, deadline, book=book)
            if choice is not None:
                return choice
            call_store = unanswered is None
        else:
            unanswered = None
        case = unanswered or await self._read_case(prompt, avoid, deadline, call_store=call_store)
        call_store &= not behind
        if call_store and not explain_all and self._booker.sorts_workers:
            look_alikes = self._policy.quote_look_alikes(case)
            if look_alikes is not None:
                call = self._choose_among_look_alikes(case, look_alikes, deadline, book=book)
                choice, failure = await self._booker.try_store(call, deadline)
                if choice is not None:
                    return choice
                case = replace(case, why=case.why or failure)
                call_store = not failure  # otherwise the store does not know these look-alikes
        quotes = self._policy.quote(case)
        if not quotes:
            raise self._no_workers(prompt, case.pool.left_out)
        if (followed := self._policy.choose_followed(prompt, case.pool)) is not None:
            case = replace(case, followed=followed)
        listed = shortlist(quotes, case.followed)
        ask = self._policy.ask(case, listed)
        if not self._settings.booking.reservations:
            evaluation = evaluate_without_bookings(ask, case.pool, listed)
            return self._choose(case, listed, evaluation.by_offer, evaluation.chosen, evaluation.source)
        failure = "reservations: no recent answer" if not behind or trying else ""
        if call_store:
            call = self._choose_in_store(case, listed, ask, deadline, book=book)
            choice, failure = await self._booker.try_store(call, deadline)
            if choice is not None:
                return choice
        if listed is not quotes:
            ask = self._policy.ask(case, quotes)
        case = replace(case, why=case.why or failure)
        return self._choose_alone(case, quotes, ask, book=book, behind=behind)

    async def decide_pair(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> PairChoice:
        """Choose one or two workers, reserved in one call if `book`; see `decide`. No other policy is followed."""
        deadline, call_store = self._start_deadline(), self._booker.may_call_store()
        case = await self._read_case(prompt, avoid, deadline, call_store=call_store)
        pairs = self._policy.quote_pairs(case).shortlist()
        if not pairs.can_serve:
            raise self._no_workers(prompt, case.pool.left_out_of_pairs)
        quotes = pairs.all_quotes
        ask = pairs.to_pair_ask(self._policy.ask(case, quotes))
        booked: tuple[Evaluation, tuple[Reservation, ...]] | None = None
        if not self._settings.booking.reservations:
            booked = evaluate_without_bookings(ask, case.pool, quotes), ()
        elif call_store:
            call = self._booker.look_or_book(prompt, ask, deadline, book=book)
            booked, failure = await self._booker.try_store(call, deadline)
            if failure and not case.why:
                case = replace(case, why=failure)
        if booked is None:
            evaluation = self._booker.look_alone(prompt.scope.pool_id, ask)
            booked = evaluation, self._booker.book_alone(prompt, ask) if book else ()
        evaluation, reservations = booked
        pair = self._builder.pair(case, PairRanking(pairs, evaluation, self._policy.criteria(prompt)), reservations)
        if pair.prefill is None:
            return replace(pair, decode=await self._name_blocks(prompt, pair.decode))
        return replace(pair, prefill=await self._name_blocks(prompt, pair.prefill, pair.decode))

    async def _name_blocks(self, prompt: Prompt, choice: Choice, *others: Choice) -> Choice:
        """The choice with the names of the blocks to fetch. `others` are booked with it: if the caller leaves, all end."""
        try:
            return await self._named_blocks.name(prompt, choice)
        except BaseException:
            for booked in (choice, *others):
                await booked.done(status=0)
            raise

    # ------------------------------------------------------------ before load

    @property
    def store_is_far(self) -> bool:
        """True if the store is so far away that a choice waits only for the index."""
        return self._distance.is_far(self._settings.deadline_ms)

    def _start_deadline(self) -> Deadline:
        least_ms, most_ms = self._settings.deadline_ms, self._settings.most_deadline_ms
        if least_ms is None:
            return Deadline(None, self._late_calls)
        calls = 1 if self.store_is_far else CALLS_A_DECISION
        return Deadline(self._late_calls.latency.deadline_ms(least_ms, most_ms, calls), self._late_calls)

    async def _read_case(self, prompt: Prompt, avoid: Collection[str], deadline: Deadline, *, call_store: bool) -> Case:
        pool, why = await self._read_pool(prompt.scope.pool_id, deadline, call_store=call_store)
        share = 1.0 if self.store_is_far else READ_SHARE
        pool = self._policy.narrow(pool, prompt, avoid)
        case = await self._index.look_up_in_time(self._named_blocks.narrow(prompt, pool), pool, deadline, share)
        if not avoid:  # of several tries one counts
            _record_fetchable(case)
        return replace(case, why=why) if why and not case.why else case

    async def _read_pool(self, pool_id: str, deadline: Deadline, *, call_store: bool) -> tuple[Pool, str]:
        if call_store and self.store_is_far and (known := self._fleet.read_behind(pool_id)) is not None:
            return known, ""
        pool, why = await self._fleet.read_pool_in_time(pool_id, deadline, call_store=call_store)
        self._counters.fleet_failures += bool(why)
        return pool, why

    def _no_workers(self, prompt: Prompt, left_out: Mapping[str, str]) -> NoWorkers:
        """The error that says in one line why no worker can take the prompt."""
        self._counters.no_workers += 1
        scope = prompt.scope
        pool = f"pool {scope.pool_id} (model {scope.model_id}, tokenizer {scope.tokenizer_id})"
        if not left_out:
            return NoWorkers(f"{pool} has no workers; is a publisher running for this model and tokenizer?")
        listed = list_left_out(left_out, MOST_NAMED)
        return NoWorkers(f"{pool}: none of {len(left_out)} workers can take the request: {listed}")

    # ------------------------------------------------------------ under load

    async def _look(self, case: Case, quotes: Sequence[Quote]) -> Evaluation:
        """Evaluate the current state; nothing is booked. Raises what the store raises."""
        ask = self._policy.ask(case, quotes)
        if not self._settings.booking.reservations:
            return evaluate_without_bookings(ask, case.pool, quotes)
        return await self._booker.look(case.prompt.scope.pool_id, ask)

    async def _choose_in_store(
        self, case: Case, quotes: Sequence[Quote], ask: Ask, deadline: Deadline, *, book: bool
    ) -> Choice:
        """Choose with the bookings of all other routers. Raises what the store raises, and TimeoutError."""
        book_cheapest = book and case.followed is None
        evaluation, reservations = await self._booker.look_or_book(case.prompt, ask, deadline, book=book_cheapest)
        if book and case.followed is not None:
            booked, reservations = await self._booker.book(case.prompt, _narrow_ask(ask, case.followed), deadline)
            quotes = _with_source(quotes, case.followed, booked.source)
        return self._choose(case, quotes, evaluation.by_offer, evaluation.chosen, evaluation.source, *reservations)

    async def _choose_by_lookup(
        self, prompt: Prompt, avoid: Collection[str], deadline: Deadline, *, book: bool
    ) -> tuple[Choice | None, Case | None]:
        """Choose with the one call that looks up, prices and books. Without a choice: the case to decide alone, if the store
        did not answer; None if it has to be asked in steps."""
        pool, why = await self._read_pool(prompt.scope.pool_id, deadline, call_store=True)
        pool = self._policy.narrow(pool, prompt, avoid)
        if self._apart_until.get(prompt.scope, 0.0) > monotonic():
            return None, None
        quotes = self._policy.quote_lookup(prompt, pool)
        if quotes is None:
            return None, None
        case = Case(prompt, pool, quotes.empty, why=why)
        call = self._choose_among(case, quotes, self._policy.ask_lookup(prompt, quotes), deadline, book=book)
        choice, failure = await self._booker.try_store(call, deadline)
        if failure:
            return None, replace(case, basis=Basis.LOAD, why=why or failure)
        return choice, None

    async def _choose_among_look_alikes(
        self, case: Case, quotes: LookAlikeQuotes, deadline: Deadline, *, book: bool
    ) -> Choice | None:
        """Choose in the store while reading few workers; see `_choose_among`."""
        return await self._choose_among(case, quotes, self._policy.ask_look_alikes(case, quotes), deadline, book=book)

    async def _choose_among(
        self, case: Case, quotes: LookAlikeQuotes | LookupQuotes, ask: Ask, deadline: Deadline, *, book: bool
    ) -> Choice | None:
        """Choose in the store; None if it knows too few workers, or can't price what the cheapest one holds. Raises what the
        store raises, and TimeoutError."""
        try:
            evaluation, reservations = await self._booker.look_or_book(case.prompt, ask, deadline, book=book)
        except LookAlikesUnknown:
            return None
        except LookupImpossible:
            if len(self._apart_until) >= MOST_SCOPES:
                self._apart_until.clear()
            self._apart_until[case.prompt.scope] = monotonic() + APART_S
            return None
        matched, by_offer, chosen = quotes.match(evaluation)
        if chosen is None:
            # the worker is newer than our reading of the pool
            with suppress(*STORE_FAILURES):  # if that fails, the choice fails below
                case = replace(case, pool=await deadline.wait_for(self._fleet.read_again(case.prompt.scope.pool_id)))
                matched, by_offer, chosen = quotes.for_pool(case.prompt, case.pool).match(evaluation)
        if chosen is None:
            for reservation in reservations:
                await reservation.end(Outcome.FAILED)
            raise Unreachable(f"worker {evaluation.worker_id} was chosen, but its fleet record can't be read")
        return self._choose(case, matched, by_offer, chosen, evaluation.source, *reservations)

    def _choose_alone(self, case: Case, quotes: Sequence[Quote], ask: Ask, *, book: bool, behind: bool) -> Choice:
        """Choose with this router's own knowledge: the last-read loads and its own bookings. `behind`: report the choice to
        the store afterwards."""
        evaluation = self._booker.look_alone(case.prompt.scope.pool_id, ask)
        if case.basis is not Basis.COST and not any(evaluated.load_known for evaluated in evaluation.by_offer):
            case = replace(case, basis=Basis.PREFIX_HASH)
            evaluation = replace(evaluation, chosen=self._policy.choose_by_prefix(case, quotes))
        worker_id = evaluation.worker_id if case.followed is None else case.followed
        reserve = self._booker.book_behind if behind else self._booker.book_alone
        reservations = reserve(case.prompt, _narrow_ask(ask, worker_id)) if book else ()
        return self._choose(case, quotes, evaluation.by_offer, evaluation.chosen, evaluation.source, *reservations)

    def _rank(
        self,
        case: Case,
        quotes: Sequence[Quote],
        by_offer: Sequence[OfferEvaluation],
        chosen: int,
        source: str | None = None,
    ) -> RankedResults:
        criteria = self._policy.criteria(case.prompt)
        return RankedResults(quotes, by_offer, chosen=chosen, criteria=criteria, source=source)

    def _choose(
        self,
        case: Case,
        quotes: Sequence[Quote],
        by_offer: Sequence[OfferEvaluation],
        chosen: int,
        source: str | None = None,
        reservation: Reservation | None = None,
    ) -> Choice:
        """The followed worker, if any, else the chosen one, with the `source` that the booking chose for it. `quotes` and
        `by_offer` have the same order."""
        results = self._rank(case, quotes, by_offer, chosen, source)
        result, would_be = results[0], None
        if case.followed is not None:
            would_be = result.worker_id
            result = next(one for one in results if one.worker_id == case.followed)
            case = replace(case, basis=Basis.POLICY, why=f"cost would choose {would_be}")
        unread = len(case.pool.candidates) - len(quotes)
        ranking = self._builder.ranking(case, results, case.pool.left_out, unread)
        return self._builder.choice(case, ranking, result, reservation, would_be=would_be)


def _record_fetchable(case: Case) -> None:
    """Let the pool learn how much of its prompts is worth keeping, if they may be fetched."""
    pool, size = case.pool, case.pool.usual_block_size
    if case.prompt.fetch_by and pool.sources and size is not None:
        chain = case.lookup.chains.get(size) or PromptChain(case.prompt, size)
        pool.fetches.record_prompt(case.prompt.scope.pool_id, chain.all_hashes(), size)


def _with_source(quotes: Sequence[Quote], worker_id: str, source: str | None) -> Sequence[Quote]:
    """The quotes, one worker's with the source that its booking chose (None: it fetches nothing)."""
    if source is None:
        return quotes
    return [quote._replace(source=source) if quote.id == worker_id else quote for quote in quotes]


def _narrow_ask(ask: Ask, worker_id: str) -> Ask:
    """Reduce the ask to one of its workers, even if that worker is over a limit."""
    return replace(ask, offers=[offer for offer in ask.offers if offer.worker_id == worker_id], limits=None)
