"""The router client: asks the index who holds a prompt, prices every worker of the pool, books the cheapest."""

import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet.store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.store import write_answer_report
from kvatlas.request import RequestHints, RequestShape, SelectionResult
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.reservations.limits import MISSES_SLO, NO_ROOM
from kvatlas.store.connection import Store, open_store
from kvatlas.telemetry import decision_span, describe_decision, observe
from router_client.booking.leases import Leases
from router_client.booking.reservation import Reservation
from router_client.counters import RouterCounters
from router_client.decision.decider import Decider, Decision, PairDecision
from router_client.decision.fail_open import Basis
from router_client.decision.fleet_cache import CachedFleet, FleetReader
from router_client.errors import NoWorkers
from router_client.learning.prediction_accuracy import AnswerComparison, AnswerTelling
from router_client.learning.rates import RateLearner
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.overlap import NOTHING, HeldPrefix, OverlapIndex, look_up
from router_client.pricing.pool import Pool
from router_client.pricing.ranking import Ranked
from router_client.prompt import Prompt
from router_client.results import Choice, PromptOverlap, Ranking, WorkerOverlap, headers_to
from router_client.settings import RouterSettings

Request = Prompt | RequestHints | RequestShape

MOST_TRACED = 8
"""So many candidates of a choice are told in a trace."""


class RouterClient:
    """Answers `overlap` and `rank`, and chooses with `route`, `book` and `pick`; safe to share between tasks of one loop.

    `overlap` and `rank` raise Unreachable where the store does not answer. A choice is made within the deadline whatever
    the store does (`Choice.basis` says by what); it raises Unreachable only where the pool's workers were never read. All
    raise InvalidValue for a request that breaks the contract.

    Enter the client (`async with`) where it books in a store: then its lease there is renewed, and leaving gives back
    whatever is still booked.
    """

    def __init__(
        self,
        index: OverlapIndex,
        fleet: FleetReader,
        settings: RouterSettings | None = None,
        *,
        reservations: Reservations | None = None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        store: Store | None = None,
    ) -> None:
        """Over an index, a fleet reader and reservations that the caller keeps open; `RouterClient.open` makes them from
        a URL. Without reservations it books in this process, so that it knows of its own choices alone. `store`: where it
        tells what it counts of answers."""
        self.settings = settings or RouterSettings()
        self.counters = RouterCounters()
        self.answers = AnswerComparison()
        self._index = index
        booked = reservations or MemoryReservations(now_us)
        self._learner = RateLearner(booked, self.settings, self.counters)
        self._fleet = CachedFleet(
            fleet, self.settings.fleet_max_age_ms, self.settings.rules, profile=self._learner.profile
        )
        self._leases = Leases(booked, self.counters, self.settings.booking.lease_s, self.settings.router_id)
        tell = partial(write_answer_report, store, self._leases.router_id) if store is not None else None
        self._telling = AnswerTelling(self.answers, tell) if tell is not None else None
        self._decider = Decider(index, self._fleet, booked, self._leases, self.settings, self.counters, now_us)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        redis_url: str,
        settings: RouterSettings | None = None,
        *,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
    ) -> AsyncIterator["RouterClient"]:
        """`async with RouterClient.open(url) as router`: a client over the store that the indexer writes.

        `wait`: try an unreachable store, or one that no indexer has laid out yet, again with back-off, telling `on_wait`
        each time. Raises Unreachable (without `wait`), InvalidValue for the URL, LayoutMismatch where the store was laid
        out by another version, or (without `wait`) not yet.
        """
        store = await open_store(redis_url, wait=wait, on_wait=on_wait)
        try:
            index = await open_redis_index(store, writer=False, wait=wait, on_wait=on_wait)
            client = cls(index, FleetStore(store), settings, reservations=RedisReservations(store), store=store)
            async with client:
                with observe("router", client.counters), observe("answers", client.answers.counts):
                    yield client
        finally:
            await store.close()

    async def __aenter__(self) -> Self:
        self._leases.start()
        self._learner.start()
        if self._telling is not None:
            self._telling.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leases.stop()
        await self._learner.stop()
        if self._telling is not None:
            await self._telling.stop()
        await self._decider.patience.close()
        await self._fleet.close()

    @property
    def load_only(self) -> bool:
        """The kill switch: True, and choices are made by load alone, without the index. May be set at any time."""
        return self._decider.sight.load_only

    @load_only.setter
    def load_only(self, on: bool) -> None:
        self._decider.sight.load_only = on

    async def workers(self, scope: Scope) -> Mapping[str, FleetRecord]:
        """Every worker of the scope's pool by id, also those that get no requests now; as last read where the store
        does not answer within the deadline. Raises Unreachable where it never was."""
        return (await self._decider.pool(scope.pool_id)).records

    def rates(self, scope: Scope) -> Mapping[str, LearnedRates]:
        """What was learned of how fast the scope's workers are, by worker; what nobody told of is as configured."""
        return self._learner.learned(scope.pool_id)

    async def overlap(self, request: Request) -> PromptOverlap:
        """What each worker of the request's pool holds of the prompt, resident and usable, by tier."""
        prompt = self._prompt(request)
        with decision_span("overlap", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            pool = await self._fleet.pool(prompt.scope.pool_id)
            found = await look_up(self._index, prompt, pool.groups)
            self.counters.lookups += found.round_trips
            silent = not all(record.endpoint.events for record in pool.records.values())
            predicted = await self._decider.predicted(prompt, pool, found) if silent else {}
            workers = [self._worker_overlap(prompt, record, found.held, predicted) for record in pool.records.values()]
            workers.sort(key=_nearest)
            describe_decision(span, candidates=len(workers))
        return PromptOverlap(prompt.input_tokens, tuple(workers))

    async def rank(self, request: Request) -> Ranking:
        """Every candidate with every term of its cost, cheapest first; empty without a candidate."""
        prompt = self._prompt(request)
        with decision_span("rank", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            decision = await self._decider.rank(prompt)
            describe_decision(span, candidates=len(decision.results))
        return self._ranking(prompt, decision.results, decision.pool.left_out)

    async def pick(self, request: Request, *, avoid: Collection[str] = ()) -> Choice:
        """The worker that `route` would book now; nothing is booked. Raises NoWorkers."""
        return await self._choose(request, avoid, book=False)

    async def book(self, request: Request, *, avoid: Collection[str] = ()) -> Choice:
        """The cheapest worker, reserved until `choice.finish()` or `choice.fail()`. For callers that can't use `route`.

        `avoid`: workers that are no candidates. Raises NoWorkers.
        """
        return await self._choose(request, avoid, book=True)

    @asynccontextmanager
    async def route(self, request: Request, *, avoid: Collection[str] = ()) -> AsyncIterator[Choice]:
        """`async with router.route(request) as choice`: the cheapest worker, reserved while the block runs.

        Chosen and reserved in one call over reported load and the live reservations of all routers. Ties go by a hash
        of the prompt, the worker and the seed: evenly, and the same from every router. `await choice.first_token()` says
        that the prefill is over; leaving the block, that the request is (by an exception: that it failed). Raises
        NoWorkers.
        """
        choice = await self.book(request, avoid=avoid)
        try:
            yield choice
        except BaseException:
            await choice.fail()
            raise
        await choice.finish()

    async def pick_pd(self, request: Request, *, avoid: Collection[str] = ()) -> PairChoice:
        """The workers that `route_pd` would book now; nothing is booked. Raises NoWorkers."""
        return await self._choose_pair(request, avoid, book=False)

    async def book_pd(self, request: Request, *, avoid: Collection[str] = ()) -> PairChoice:
        """What `route_pd` chooses, reserved until `choice.finish()` or `choice.fail()`. Raises NoWorkers."""
        return await self._choose_pair(request, avoid, book=True)

    @asynccontextmanager
    async def route_pd(self, request: Request, *, avoid: Collection[str] = ()) -> AsyncIterator[PairChoice]:
        """`async with router.route_pd(request) as pair`: who computes the prompt and who the answer, both reserved.

        `pair.prefill` is None where one worker does both: because that costs less, or there is little to compute. Chosen
        and reserved in one call, and given back together, as by `route`. Raises NoWorkers.
        """
        pair = await self.book_pd(request, avoid=avoid)
        try:
            yield pair
        except BaseException:
            await pair.fail()
            raise
        await pair.finish()

    async def _choose(self, request: Request, avoid: Collection[str], *, book: bool) -> Choice:
        prompt = self._prompt(request)
        started_ns = time.perf_counter_ns()
        with decision_span("route", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            decision = await self._decider.decide(prompt, avoid, book=book)
            if not decision.results:
                self.counters.no_workers += 1
                raise NoWorkers(why_none(prompt, decision.pool.left_out))
            pool = decision.pool
            ranking = self._ranking(prompt, decision.results, pool.left_out)
            choice = self._choice(prompt, pool, decision.result, ranking, decision, decision.reservation, learns=True)
            _describe(span, choice, pool)
            if span.is_recording():
                span.set_attribute("kvatlas.explanation", json.dumps(choice.explanation(MOST_TRACED)))
        self._count(choice, started_ns)
        return choice

    async def _choose_pair(self, request: Request, avoid: Collection[str], *, book: bool) -> PairChoice:
        prompt = self._prompt(request)
        started_ns = time.perf_counter_ns()
        with decision_span("route_pd", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            decision = await self._decider.decide_pair(prompt, avoid, book=book)
            ranking, pool = decision.ranking, decision.pool
            if ranking is None:
                self.counters.no_workers += 1
                raise NoWorkers(why_none(prompt, pool.unable_to_answer))

            def part(result: SelectionResult, results: Ranked, booked: Reservation | None) -> Choice:
                told = self._ranking(prompt, results, pool.unable)
                # rates are learned where one worker did everything: who takes how much of a pair's time is not told
                return self._choice(prompt, pool, result, told, decision, booked, learns=ranking.prefill is None)

            answers, prompts = (*decision.booked, None, None)[:2]
            prefill = None if ranking.prefill is None else part(ranking.prefill, ranking.prefills, prompts)
            results = ranking.wholes if prefill is None else ranking.decodes
            pair = PairChoice(part(ranking.decode, results, answers), prefill, ranking)
            _describe(span, prefill or pair.decode, pool)
            if span.is_recording():
                span.set_attribute("kvatlas.decode_worker", pair.worker_id)
                span.set_attribute("kvatlas.explanation", json.dumps(pair.explanation(MOST_TRACED)))
        self.counters.pairs += prefill is not None
        self._count(prefill or pair.decode, started_ns)
        return pair

    def _choice(
        self,
        prompt: Prompt,
        pool: Pool,
        result: SelectionResult,
        ranking: Ranking,
        decision: Decision | PairDecision,
        booked: Reservation | None,
        *,
        learns: bool,
    ) -> Choice:
        """`learns`: what the request takes is compared with what was predicted, and learned from."""
        endpoint = pool.records[result.worker_id].endpoint
        return Choice(
            endpoint.id,
            endpoint.url,
            headers_to(endpoint),
            endpoint.role,
            result,
            ranking,
            decision.basis,
            decision.why,
            decision.would_be,
            booked,
            self._learner.feedback(prompt.scope.pool_id, ranking.results, result) if learns else None,
            partial(self.answers.answered, prompt, result, decision.basis) if learns else None,
        )

    def _ranking(self, prompt: Prompt, results: Sequence[SelectionResult], left_out: Mapping[str, str]) -> Ranking:
        return Ranking(prompt.input_tokens, results, left_out, prompt.slo, self.settings.limits.shed_factor)

    def _count(self, choice: Choice, started_ns: int) -> None:
        counters, result = self.counters, choice.result
        counters.routed += 1
        counters.by_load += choice.basis is Basis.LOAD
        counters.by_prefix_hash += choice.basis is Basis.PREFIX_HASH
        counters.followed += choice.would_be is not None
        counters.agreed += choice.would_be == choice.worker_id
        counters.required_blocks += result.required_blocks
        counters.overlap_blocks += result.overlap_blocks
        counters.predicted_tokens += result.predicted_tokens
        counters.no_room += bool(result.over & NO_ROOM)
        counters.over_slo += bool(result.over & MISSES_SLO)
        counters.decision_time_us += (time.perf_counter_ns() - started_ns) // 1_000

    def _prompt(self, request: Request) -> Prompt:
        if isinstance(request, Prompt):
            return request
        if isinstance(request, RequestShape):
            return Prompt.of_shape(request)
        return Prompt.of_hints(request, self.settings.fallbacks)

    def _worker_overlap(
        self, prompt: Prompt, record: FleetRecord, held: Mapping[str, HeldPrefix], predicted: Mapping[str, int]
    ) -> WorkerOverlap:
        endpoint = record.endpoint
        mine = held.get(endpoint.id, NOTHING)
        size = endpoint.block_size or 0
        usable = self.settings.rules.of(endpoint).usable_tokens(mine.tokens, prompt.input_tokens, size or 1)
        by_tier: dict[Tier, int] = {}
        for run in mine.runs:
            by_tier[run.tiers[0]] = by_tier.get(run.tiers[0], 0) + run.tokens
        return WorkerOverlap(
            worker_id=endpoint.id,
            block_size=size,
            required_blocks=prompt.required_blocks(size) if size else 0,
            resident_blocks=mine.tokens // size if size else 0,
            resident_tokens=mine.tokens,
            usable_blocks=usable // size if size else 0,
            usable_tokens=usable,
            tokens_by_tier=dict(sorted(by_tier.items())),
            routable=record.routable,
            events=endpoint.events,
            predicted_tokens=0 if endpoint.events else predicted.get(endpoint.id, 0),
        )


def _describe(span: Span, choice: Choice, pool: Pool) -> None:
    result = choice.result
    describe_decision(
        span,
        worker_id=result.worker_id,
        required_blocks=result.required_blocks,
        overlap_blocks=result.overlap_blocks,
        candidates=len(choice.ranking),
        applied=[pool.records[result.worker_id].trace],
    )
    if span.is_recording():
        span.set_attribute("kvatlas.usable_tokens", result.usable_tokens)
        span.set_attribute("kvatlas.cost_us", result.score_us)
        span.set_attribute("kvatlas.basis", choice.basis.value)
        if choice.would_be is not None:
            span.set_attribute("kvatlas.would_be", choice.would_be)


def _nearest(worker: WorkerOverlap) -> tuple[int, int, str]:
    return -worker.usable_tokens - worker.predicted_tokens, -worker.resident_tokens, worker.worker_id


def why_none(prompt: Prompt, left_out: Mapping[str, str]) -> str:
    """One line: why nobody may get a prompt."""
    scope = prompt.scope
    pool = f"pool {scope.pool_id} (model {scope.model_id}, tokenizer {scope.tokenizer_id})"
    if not left_out:
        return f"{pool} has no workers; is a publisher running for this model and tokenizer?"
    told = ", ".join(f"{id} ({why})" for id, why in islice(left_out.items(), 8))
    return f"{pool}: no worker is left of {len(left_out)}: {told}"
