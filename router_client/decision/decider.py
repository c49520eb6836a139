"""The steps of one choice: read the pool, look up the overlap, price the candidates, and book the one that is cheapest
under load.

Each step has its own file (`fleet_cache`, `index_lookup`, `policy`, `router_client.booking.booker`), and all share one
deadline. If the store is slow or down, the choice continues without it.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from kvatlas.errors import Unreachable
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas.reservations import (
    Ask,
    Evaluation,
    LookAlikesUnknown,
    LookupImpossible,
    Outcome,
    Turns,
    WaitingRequest,
)
from kvatlas.store.deadline import CALLS_A_DECISION, READ_SHARE, STORE_FAILURES, Deadline, LateCalls
from kvatlas.store.distance import StoreDistance
from router_client.basis import Basis
from router_client.booking.ask import narrow_ask
from router_client.booking.booker import Booker, evaluate_without_bookings
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.case import Case
from router_client.decision.choice_builder import ChoiceBuilder
from router_client.decision.index_lookup import IndexLookup
from router_client.decision.named_blocks import NamedBlocks
from router_client.decision.policy import RoutingPolicy
from router_client.decision.storeless_decider import StorelessDecider
from router_client.errors import NoWorkers
from router_client.fleet_cache import FleetCache
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.look_alikes import LookAlikeQuotes
from router_client.pricing.lookups import LookupQuotes
from router_client.pricing.overlap import PromptLookup
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairRanking
from router_client.pricing.quotes import Quote, shortlist, with_source
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.results import Choice, Ranking, list_left_out
from router_client.settings import RouterSettings

APART_S = 2.0
MOST_SCOPES = 4_096
MOST_NAMED = 8
"""Maximum number of left-out workers, or of models, that an error message lists."""


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
        self._storeless = StorelessDecider(self._policy, booker, builder)
        self._apart_until: dict[Scope, float] = {}
        """Until when choices use a separate lookup, because blocks outside HBM have to be priced, one call would read too many
        workers, or the index is damaged."""

    async def read_pool(self, pool_id: str) -> Pool:
        """The pool, read within the deadline, or else as last read. Raises Unreachable if it has never been read."""
        pool, _ = await self._read_pool(pool_id, self._start_deadline(), call_store=True)
        return pool

    async def rank(self, prompt: Prompt) -> Ranking:
        """Rank every candidate. Raises whatever the store raises."""
        pool = self._policy.narrow(await self._fleet.read_pool(prompt.scope.pool_id), prompt)
        prompt = self._named_blocks.narrow(prompt, pool)
        case = Case(prompt, pool, await self._index.look_up(prompt, pool))
        quotes = shortlist(self._policy.quote(case))
        if not quotes:
            return self._builder.ranking(case, (), pool.left_out)
        evaluation = await self._look(case, quotes)
        quotes = with_source(quotes, evaluation.worker_id, evaluation.source)
        results = self._policy.rank(prompt, quotes, evaluation.by_offer, evaluation.chosen)
        return self._builder.ranking(case, results, pool.left_out)

    async def predict_tokens(self, prompt: Prompt, pool: Pool, lookup: PromptLookup) -> dict[str, int]:
        """For each worker, the tokens that `rank` would predict beyond the lookup. Raises whatever the store raises."""
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

        Stays within the deadline, whatever the store does; only naming the blocks to fetch may take longer. Raises
        NoWorkers, or Unreachable if the pool has never been read.
        """
        return await self._name_blocks(prompt, await self._decide(prompt, avoid, book=book, explain_all=explain_all))

    async def _decide(self, prompt: Prompt, avoid: Collection[str], *, book: bool, explain_all: bool) -> Choice:
        """Choose in the first of these ways that works; after a failure of the store, only in the last one.

        1. One call to the store looks up, prices and books.
        2. The index is asked first. Then the store chooses among a few named workers and all the others, which are
           look-alikes.
        3. The same, but all workers are named.
        4. This router chooses alone, by the loads that were read last and its own bookings.
        """
        call_store = self._booker.may_call_store()
        # don't wait for a booking in a store that is far away, or that has failed and is being retried
        trying = book and self._booker.is_trying
        behind = call_store and (self.store_is_far or trying)
        call_store &= not trying
        waits = call_store and not behind
        names_all = self._policy.names_all(prompt)
        explain_all = explain_all or self._settings.explain_all
        deadline = self._start_deadline()
        pool, why = await self._read_narrowed(prompt, avoid, deadline, call_store=call_store)
        prompt = self._waiting_among(prompt, pool)
        case: Case | None = None
        if waits and not names_all:
            choice, case = await self._choose_by_lookup(prompt, pool, why, deadline, book=book, explain_all=explain_all)
            if choice is not None:
                return choice
            waits = case is None
        if case is None:
            case = await self._look_up(prompt, pool, why, deadline, counts=not avoid)
        if not case.pool.candidates:
            raise await self._no_workers(prompt, case.pool.left_out, deadline)
        names_all = names_all or explain_all
        failure = "reservations: no recent answer" if not behind or trying else ""
        if waits and not names_all:
            choice, failure = await self._choose_among_look_alikes(case, deadline, book=book)
            if choice is not None:
                return choice
            waits = not failure
        if (followed := self._policy.choose_followed(prompt, case.pool)) is not None:
            case = replace(case, followed=followed, prompt=_waiting_for(case.prompt, case.pool, {followed}))
        if waits or not self._settings.booking.reservations:
            quotes = self._policy.quote(case)
            listed = shortlist(quotes, case.followed)
            ask = self._policy.ask(case, listed)
            if not self._settings.booking.reservations:
                evaluation = evaluate_without_bookings(ask, case.pool, listed)
                if book:
                    self._booker.wait_without_room(case.prompt, _choosing(evaluation, case.followed))
                listed = with_source(listed, evaluation.worker_id, evaluation.source)
                results = self._policy.rank(case.prompt, listed, evaluation.by_offer, evaluation.chosen)
                return self._builder.chosen(case, results)
            call = self._choose_in_store(case, listed, ask, deadline, book=book)
            choice, failure = await self._booker.try_store(call, deadline)
            if choice is not None:
                return choice
        case = replace(case, why=case.why or failure)
        return self._storeless.choose(case, names_all=names_all, book=book, behind=behind)

    async def decide_pair(self, prompt: Prompt, avoid: Collection[str], *, book: bool) -> PairChoice:
        """Choose one or two workers, reserved in one call if `book`; see `decide`. Does not follow another policy."""
        deadline, call_store = self._start_deadline(), self._booker.may_call_store()
        pool, why = await self._read_narrowed(prompt, avoid, deadline, call_store=call_store)
        prompt = self._waiting_among(prompt, pool)
        case = await self._look_up(prompt, pool, why, deadline, counts=not avoid)
        pairs = self._policy.quote_pairs(case).shortlist()
        if not pairs.can_serve:
            raise await self._no_workers(prompt, case.pool.left_out_of_pairs, deadline)
        quotes = pairs.all_quotes
        ask = pairs.to_pair_ask(self._policy.ask(case, quotes))
        booked: tuple[Evaluation, tuple[Reservation, ...]] | None = None
        if not self._settings.booking.reservations:
            booked = evaluate_without_bookings(ask, case.pool, quotes), ()
            if book:
                self._booker.wait_without_room(case.prompt, booked[0])
        elif call_store:
            call = self._booker.look_or_book(prompt, ask, deadline, book=book)
            booked, failure = await self._booker.try_store(call, deadline)
            if failure and not case.why:
                case = replace(case, why=failure)
        if booked is None:
            look = self._booker.look_alone
            booked = self._booker.book_alone(prompt, ask) if book else (look(prompt.scope.pool_id, ask), ())
        evaluation, reservations = booked
        pair = self._builder.pair(case, PairRanking(pairs, evaluation, self._policy.criteria(prompt)), reservations)
        if pair.prefill is None:
            return replace(pair, decode=await self._name_blocks(prompt, pair.decode))
        return replace(pair, prefill=await self._name_blocks(prompt, pair.prefill, pair.decode))

    async def turns(
        self, pool_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> tuple[Turns, bool]:
        """See `RouterClient.turns`."""
        return await self._booker.turns(pool_id, left, waiting, call_store=not self.store_is_far)

    async def _name_blocks(self, prompt: Prompt, choice: Choice, *others: Choice) -> Choice:
        """Return the choice with the names of the blocks to fetch. `others`: choices booked together with it. If the
        caller is cancelled, all of these bookings end."""
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

    async def _read_narrowed(
        self, prompt: Prompt, avoid: Collection[str], deadline: Deadline, *, call_store: bool
    ) -> tuple[Pool, str]:
        """The pool without the workers that may not get the prompt and, if it could not be read again, the reason."""
        pool, why = await self._read_pool(prompt.scope.pool_id, deadline, call_store=call_store)
        return self._policy.narrow(pool, prompt, avoid), why

    def _waiting_among(self, prompt: Prompt, pool: Pool) -> Prompt:
        """The prompt. If workers are missing from the narrowed pool, or the caches of some are too small, it waits only for
        the remaining ones on which it fits."""
        if prompt.waiting is None or not prompt.waiting.may_wait:
            return prompt
        whole = self._fleet.last_known(prompt.scope.pool_id)
        fits = pool.fits_everywhere(prompt.input_tokens)
        if fits and (whole is None or pool is whole or pool.sizes == whole.sizes):
            return prompt
        return _waiting_for(prompt, pool, pool.serving)

    async def _look_up(self, prompt: Prompt, pool: Pool, why: str, deadline: Deadline, *, counts: bool) -> Case:
        """The case, including what the pool's workers hold. `counts`: count this prompt; if there are several attempts,
        only one is counted."""
        share = 1.0 if self.store_is_far else READ_SHARE
        case = await self._index.look_up_in_time(self._named_blocks.narrow(prompt, pool), pool, deadline, share)
        if counts:
            _record_fetchable(case)
        return replace(case, why=why) if why and not case.why else case

    async def _read_pool(self, pool_id: str, deadline: Deadline, *, call_store: bool) -> tuple[Pool, str]:
        if call_store and self.store_is_far and (known := self._fleet.read_behind(pool_id)) is not None:
            return known, ""
        pool, why = await self._fleet.read_pool_in_time(pool_id, deadline, call_store=call_store)
        self._counters.fleet_failures += bool(why)
        return pool, why

    async def _no_workers(self, prompt: Prompt, left_out: Mapping[str, str], deadline: Deadline) -> NoWorkers:
        """The error that says in one line why no worker can take the prompt."""
        self._counters.no_workers += 1
        scope = prompt.scope
        pool = f"pool {scope.pool_id} (model {scope.model_id}, tokenizer {scope.tokenizer_id})"
        if not left_out:
            models = await self._other_models(scope, deadline)
            return NoWorkers(f"{pool} has no workers; is a publisher running for this model and tokenizer?{models}")
        listed = list_left_out(left_out, MOST_NAMED)
        return NoWorkers(f"{pool}: none of {len(left_out)} workers can take the request: {listed}")

    async def _other_models(self, scope: Scope, deadline: Deadline) -> str:
        """A sentence that lists the models that have workers; empty for a tenant, because a tenant must not see all of
        them."""
        models: Sequence[tuple[str, str]] = ()
        if scope.tenant_id == DEFAULT_TENANT:
            with suppress(*STORE_FAILURES):
                models = await deadline.wait_for(self._fleet.models())
        if not models:
            return ""
        named = ", ".join(
            f"{model!r:.80}" + (f" (tokenizer {tokenizer!r:.80})" if tokenizer != model else "")
            for model, tokenizer in models[:MOST_NAMED]
        )
        more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
        return f" There are workers for {named}{more}"

    # ------------------------------------------------------------ under load

    async def _look(self, case: Case, quotes: Sequence[Quote]) -> Evaluation:
        """Evaluate the current state; nothing is booked. Raises whatever the store raises."""
        ask = self._policy.ask(case, quotes)
        if not self._settings.booking.reservations:
            return evaluate_without_bookings(ask, case.pool, quotes)
        return await self._booker.look(case.prompt.scope.pool_id, ask)

    async def _choose_in_store(
        self, case: Case, quotes: Sequence[Quote], ask: Ask, deadline: Deadline, *, book: bool
    ) -> Choice:
        """Choose with the bookings of all other routers. Raises whatever the store raises, or TimeoutError."""
        book_cheapest = book and case.followed is None
        evaluation, reservations = await self._booker.look_or_book(case.prompt, ask, deadline, book=book_cheapest)
        quotes = with_source(quotes, evaluation.worker_id, evaluation.source)
        if book and case.followed is not None:
            booked, reservations = await self._booker.book(case.prompt, narrow_ask(ask, case.followed), deadline)
            quotes = with_source(quotes, case.followed, booked.source)
        results = self._policy.rank(case.prompt, quotes, evaluation.by_offer, evaluation.chosen)
        return self._builder.chosen(case, results, *reservations)

    async def _choose_by_lookup(
        self, prompt: Prompt, pool: Pool, why: str, deadline: Deadline, *, book: bool, explain_all: bool
    ) -> tuple[Choice | None, Case | None]:
        """Choose with the one call that looks up, prices and books. If there is no choice, returns the case for this router
        to decide alone because the store did not answer, or None if the store has to be asked in steps. `why`: the pool
        could not be read again."""
        if not (self._booker.looks_up and self._index.is_used_for(prompt)):
            return None, None
        if self._apart_until.get(prompt.scope, 0.0) > monotonic():
            return None, None
        quotes = self._policy.quote_lookup(prompt, pool, explain_all=explain_all)
        if quotes is None:
            return None, None
        case = Case(prompt, pool, quotes.empty, why=why)
        call = self._choose_among(case, quotes, self._policy.ask_lookup(prompt, quotes), deadline, book=book)
        choice, failure = await self._booker.try_store(call, deadline)
        if failure:
            return None, replace(case, basis=Basis.LOAD, why=why or failure)
        return choice, None

    async def _choose_among_look_alikes(
        self, case: Case, deadline: Deadline, *, book: bool
    ) -> tuple[Choice | None, str]:
        """Choose in the store while reading only a few workers. If there is no choice, returns why the store failed, or ''
        if all workers have to be named."""
        quotes = self._policy.quote_look_alikes(case) if self._booker.sorts_workers else None
        if quotes is None:
            return None, ""
        call = self._choose_among(case, quotes, self._policy.ask_look_alikes(case, quotes), deadline, book=book)
        return await self._booker.try_store(call, deadline)

    async def _choose_among(
        self, case: Case, quotes: LookAlikeQuotes | LookupQuotes, ask: Ask, deadline: Deadline, *, book: bool
    ) -> Choice | None:
        """Choose in the store; None if the store knows too few workers, or can't price what the cheapest one holds. Raises
        whatever the store raises, or TimeoutError."""
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
                matched, by_offer, chosen = quotes.for_pool(case.pool).match(evaluation)
        if chosen is None:
            for reservation in reservations:
                await reservation.end(Outcome.FAILED)
            raise Unreachable(f"worker {evaluation.worker_id} was chosen, but its fleet record can't be read")
        matched = with_source(matched, evaluation.worker_id, evaluation.source)
        results = self._policy.rank(case.prompt, matched, by_offer, chosen)
        return self._builder.chosen(case, results, *reservations)


def _record_fetchable(case: Case) -> None:
    """Record the prompt for the pool's working set, if its blocks may be fetched."""
    pool, size = case.pool, case.pool.usual_block_size
    if case.prompt.fetch_by and pool.sources and size is not None:
        chain = case.lookup.chains.get(size) or PromptChain(case.prompt, size)
        pool.fetches.record_prompt(case.prompt.scope.pool_id, chain.all_hashes(), size)


def _waiting_for(prompt: Prompt, pool: Pool, workers: Set[str]) -> Prompt:
    """The prompt, set to wait only for those of these workers whose caches can hold it. If there are none, it does not wait,
    because there would never be room."""
    if prompt.waiting is None or not prompt.waiting.may_wait:
        return prompt
    fit = workers & pool.serving_prompts_of(prompt.input_tokens)
    return replace(prompt, waiting=prompt.waiting.among(fit) if fit else None)


def _choosing(evaluation: Evaluation, followed: str | None) -> Evaluation:
    """The evaluation, with the followed policy's worker chosen, if there is one."""
    numbers = (number for number, offer in enumerate(evaluation.offers) if offer.worker_id == followed)
    return replace(evaluation, chosen=next(numbers, evaluation.chosen))
