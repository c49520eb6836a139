"""The router client: looks up which workers hold a prompt, prices every worker of the pool, and books the cheapest."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from opentelemetry.trace import Span

from kvatlas.blocks.block_names import said_sequence_hash
from kvatlas.blocks.residency import BlockKey, Residency
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.dataclass import replace
from kvatlas.errors import NotSupported
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.answering_index import open_answering_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.predictions.store import write_answer_report
from kvatlas.predictions.usage_counts import add_answer_use
from kvatlas.request import RequestHints, RequestShape
from kvatlas.reservations import (
    MemoryReservations,
    Outcome,
    RedisReservations,
    Reservations,
    Turns,
    WaitingRequest,
)
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import Store, connected_store
from kvatlas.store.deadline import LateCalls
from kvatlas.store.distance import StoreDistance
from kvatlas.telemetry import decision_span, describe_decision, export_metrics
from router_client.booking.booker import Booker
from router_client.booking.leases import Leases
from router_client.choice_statistics import ChoiceStatistics
from router_client.counters import RouterCounters
from router_client.decision.choice_builder import ChoiceBuilder
from router_client.decision.decider import Decider
from router_client.decision.history import DecisionHistory
from router_client.decision.index_lookup import IndexLookup
from router_client.decision.index_source import open_overlap_index
from router_client.decision.named_blocks import EngineHashSource, NamedBlocks
from router_client.fleet_cache import FleetCache, FleetReader
from router_client.learning.bound_shares import BoundShares
from router_client.learning.condition import ConditionMeter
from router_client.learning.fetches import Fetches
from router_client.learning.output_lengths import OutputLengths
from router_client.learning.prediction_accuracy import AccuracyReporter, PredictionAccuracy
from router_client.learning.rates import RateLearner
from router_client.learning.usage_reports import AnswerUsage
from router_client.overlap_result import PromptOverlap, list_overlaps
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.overlap import BlockIndex, OverlapIndex, ReportsStatus
from router_client.prompt import Prompt
from router_client.request_feed import RequestFeed
from router_client.results import Choice, LazySequence, Ranking
from router_client.settings import RouterSettings

_log = logging.getLogger("router_client")

Request = Prompt | RequestHints | RequestShape

MOST_TRACED = 8
"""Maximum number of candidates that a trace explains for each choice."""


class RouterClient:
    """Compares workers with `overlap` and `rank`, and chooses one with `route` or `reserve`. Can be shared between tasks of
    one event loop.

    `overlap` and `rank` raise Unreachable if the store does not answer. A choice is made within the deadline, whatever the
    store does (`Choice.basis` says how); it raises Unreachable only if the pool's workers have never been read. All calls
    raise InvalidValue for a request that breaks the contract.

    Enter the client (`async with`) if it books in a store: it then renews its lease there, and exiting the block releases
    everything that is still booked.
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
        engine_hashes: EngineHashSource | None = None,
    ) -> None:
        """Works on an index, a fleet reader and reservations that the caller keeps open; `RouterClient.open` creates them from
        a URL. Without reservations, the client books in this process and knows only its own choices. `store`: the store to
        which it reports its prediction accuracy (`answers`). `engine_hashes`: needed for engines that fetch blocks by each
        other's own hashes (KVCR); without it, nothing is fetched in this way."""
        self.settings = settings or RouterSettings()
        self._index = index
        self._bounds = BoundShares(self.settings.rules)
        self._output_lengths = OutputLengths()
        fetches = Fetches()
        self._statistics = ChoiceStatistics(
            self._bounds, fetches, self._output_lengths if self.settings.learning.on else None
        )
        self.counters: RouterCounters = self._statistics.counters
        self.answers: PredictionAccuracy = self._statistics.answers
        self.feed: RequestFeed = self._statistics.feed
        self.history: DecisionHistory = self._statistics.history
        shared = reservations or MemoryReservations(now_us)
        self._reservations = shared
        self._learner = RateLearner(shared, self.settings, self.counters)
        self._distance = StoreDistance(store)
        self._fleet = FleetCache(
            fleet,
            self.settings.fleet_max_age_ms,
            self._bounds,
            profile=self._learner.profile,
            fetches=fetches,
        )
        self._leases = Leases(shared, self.counters, self.settings.booking.lease_s, self.settings.router_id)
        report = None if store is None else partial(write_answer_report, store, self._leases.router_id)
        self.condition = ConditionMeter(self.counters, self._distance, self.settings.deadline_ms)
        self.answers.condition = self.condition.read
        self.answers.known_pools = self._fleet.known_pools
        if store is not None:
            self._statistics.usage = AnswerUsage(partial(add_answer_use, store, self._leases.router_id))
        self._accuracy_reporter = None if report is None else AccuracyReporter(self.answers, report)
        self._lookup = IndexLookup(index, self.counters, load_only=self.settings.load_only)
        self._late_calls = LateCalls()
        self._builder = ChoiceBuilder(self._learner, self._statistics, self.settings.limits.shed_factor)
        self._decider = Decider(
            self._lookup,
            self._fleet,
            Booker(
                self._fleet,
                shared,
                self._leases,
                self.settings,
                self.counters,
                self._late_calls,
                now_us,
            ),
            self._builder,
            self.settings,
            self.counters,
            self._late_calls,
            self._distance,
            NamedBlocks(engine_hashes),
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        redis: RedisAccess | str,
        settings: RouterSettings | None = None,
        *,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
    ) -> AsyncIterator["RouterClient"]:
        """`async with RouterClient.open(url) as router`: a client for the store that the indexer writes.

        `redis`: the store's URL, or a `RedisAccess` with certificates. `wait`: try again, with back-off, if the store is
        unreachable or no indexer has created a layout yet; `on_wait` is called with a line of text each time (default: log
        a warning). Raises Unreachable (without `wait`), InvalidValue for an invalid URL, or LayoutMismatch if the store's
        layout has a different version or (without `wait`) if there is no layout yet.
        """
        on_wait = on_wait or _log.warning
        async with connected_store(redis, wait=wait, on_wait=on_wait) as store:
            replica = settings.replica if settings is not None else None
            stored = await open_answering_index(store, wait=wait, on_wait=on_wait)
            async with (
                open_overlap_index(store, stored, replica) as index,
                cls(
                    index,
                    FleetStore(store),
                    settings,
                    reservations=RedisReservations(store, stored if replica is None else None),
                    store=store,
                ) as client,
            ):
                with export_metrics("router", client.counters), export_metrics("answers", client.answers.counts):
                    await _prepare(store)
                    yield client

    async def __aenter__(self) -> Self:
        self._leases.start()
        self._distance.start()
        self._learner.start()
        if self._accuracy_reporter is not None:
            self._accuracy_reporter.start()
        if self._statistics.usage is not None:
            self._statistics.usage.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._distance.stop()
        await self._leases.stop()
        await self._learner.stop()
        if self._accuracy_reporter is not None:
            await self._accuracy_reporter.stop()
        if self._statistics.usage is not None:
            await self._statistics.usage.stop()
        await self._late_calls.close()
        await self._fleet.close()

    @property
    def router_id(self) -> str:
        """The name of this router's lease."""
        return self._leases.router_id

    @property
    def load_only(self) -> bool:
        """The kill switch: if True, choices are made by load alone, without the index. May be set at any time."""
        return self._lookup.load_only

    @load_only.setter
    def load_only(self, on: bool) -> None:
        self._lookup.load_only = on

    @property
    def replica_status(self) -> Mapping[str, Any] | None:
        """The state of this process's copy of the index, its age and its counters; None if there is no copy."""
        return self._index.status() if isinstance(self._index, ReportsStatus) else None

    async def workers(self, scope: Scope) -> Mapping[str, FleetRecord]:
        """Every worker of the scope's pool by id, including those that get no requests now. If the store does not answer
        within the deadline, returns the workers that were read last. Raises Unreachable if there are none."""
        return (await self._decider.read_pool(scope.pool_id)).records

    async def record_end(self, pool_id: str, id: bytes, outcome: Outcome | None) -> bool:
        """Record how a reservation of any of the pool's routers ended, or (None) that its first token has arrived. Returns
        False if the reservation does not exist, or no longer exists. Raises Unreachable."""
        if outcome is None:
            return await self._reservations.record_first_token(pool_id, id)
        return await self._reservations.release(pool_id, id, outcome)

    async def find_booked(self, pool_id: str, ids: Sequence[bytes]) -> set[bytes]:
        """Return those of these reservations, made by any router of the pool, that have not ended. Raises
        Unreachable."""
        return await self._reservations.find_booked(pool_id, ids)

    def rates(self, scope: Scope) -> Mapping[str, LearnedRates]:
        """The rates learned for the scope's pool, by worker. Workers without evidence are priced with the configured
        rates."""
        return self._learner.learned(scope.pool_id)

    async def locate(self, scope: Scope, block: int | BlockKey) -> Sequence[Residency]:
        """Every residency of one block, by worker and tier. `block`: its sequence hash, or a key that contains it
        (`kvatlas.blocks.block_names`; `kvatlas.block_lookup` also accepts engines' own hashes). Raises Unreachable,
        InvalidValue for a key without a sequence hash, or NotSupported if the client's index answers only overlap
        queries."""
        return await self._block_index().locate(scope, said_sequence_hash(block))

    async def children(self, scope: Scope, prefix: int | BlockKey | None = None) -> Sequence[Residency]:
        """Every residency of the blocks that follow this one (None: of the first blocks), by hash, worker and tier.
        Raises what `locate` raises, and NotSupported if there is no side index (`kvatlas indexer --side-index`)."""
        return await self._block_index().children(scope, None if prefix is None else said_sequence_hash(prefix))

    async def overlap(self, request: Request) -> PromptOverlap:
        """The resident and usable blocks and tokens of the prompt on each worker of the pool, by tier."""
        prompt = self._prompt(request)
        with decision_span("overlap", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            pool = await self._fleet.read_pool(prompt.scope.pool_id)
            lookup = await self._lookup.look_up(prompt, pool)
            eventless = not all(record.endpoint.events for record in pool.records.values())
            predicted = await self._decider.predict_tokens(prompt, pool, lookup) if eventless else {}
            describe_decision(span, candidates=len(pool.records))

        workers = LazySequence(partial(list_overlaps, prompt, pool.records, lookup.held, predicted, self._bounds))
        return PromptOverlap(prompt.input_tokens, workers, self._builder.remarks(prompt, pool))

    async def rank(self, request: Request) -> Ranking:
        """Every candidate with every term of its cost, cheapest first; empty if there are no candidates."""
        prompt = self._prompt(request)
        with decision_span("rank", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            ranking = await self._decider.rank(prompt)
            describe_decision(span, candidates=len(ranking))
        return ranking

    async def reserve(self, request: Request, *, avoid: Collection[str] = (), dry_run: bool = False) -> Choice:
        """The cheapest worker, reserved until `choice.done()`. For callers that can't use `route`.

        `avoid`: workers that must not be chosen. `dry_run`: nothing is reserved. Raises NoWorkers.
        """
        return await self._choose(request, avoid, book=not dry_run)

    @asynccontextmanager
    async def route(self, request: Request, *, avoid: Collection[str] = ()) -> AsyncIterator[Choice]:
        """`async with router.route(request) as choice`: the cheapest worker, reserved while the block runs.

        It is chosen and reserved in one call, which takes into account the reported load and the current reservations of all
        routers. Ties are broken by a hash of the prompt, the worker and the seed: evenly, and in the same way on every router.
        Call `await choice.first_token()` when the prefill is over. Exiting the block ends the request (as failed, if an
        exception caused the exit), unless `choice.done(...)` has already done so. Raises NoWorkers.
        """
        choice = await self.reserve(request, avoid=avoid)
        try:
            yield choice
        except BaseException:
            await choice.done(status=0)
            raise
        await choice.done()

    async def turns(
        self, pool_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> tuple[Turns, bool]:
        """Find out which of this router's waiting requests may be tried now, and whether the store decided that; see
        `Reservations.turns`. If the store does not answer, or is far away, this router orders its own requests."""
        return await self._decider.turns(pool_id, left, waiting)

    async def reserve_pd(self, request: Request, *, avoid: Collection[str] = (), dry_run: bool = False) -> PairChoice:
        """The pair that `route_pd` would choose, reserved until `pair.done()`; see `reserve`. Raises NoWorkers."""
        return await self._choose_pair(request, avoid, book=not dry_run)

    @asynccontextmanager
    async def route_pd(self, request: Request, *, avoid: Collection[str] = ()) -> AsyncIterator[PairChoice]:
        """`async with router.route_pd(request) as pair`: the workers for prompt and answer, both reserved.

        `pair.prefill` is None if one worker does both because that is cheaper or because there is little to compute. Both are
        chosen and reserved in one call, and released together, as in `route`. Raises NoWorkers.
        """
        pair = await self.reserve_pd(request, avoid=avoid)
        try:
            yield pair
        except BaseException:
            await pair.done(status=0)
            raise
        await pair.done()

    async def _choose(self, request: Request, avoid: Collection[str], *, book: bool) -> Choice:
        prompt = self._prompt(request)
        started_ns = time.perf_counter_ns()
        with decision_span("route", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            choice = await self._decider.decide(prompt, avoid, book=book, explain_all=span.is_recording())
            _describe(span, choice)
            if span.is_recording():
                span.set_attribute("kvatlas.explanation", json.dumps(choice.explanation(MOST_TRACED)))
        self._statistics.count_choice(choice, started_ns)
        if book:
            self._statistics.remember(prompt, choice)
        return choice

    async def _choose_pair(self, request: Request, avoid: Collection[str], *, book: bool) -> PairChoice:
        prompt = self._prompt(request)
        started_ns = time.perf_counter_ns()
        with decision_span("route_pd", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            pair = await self._decider.decide_pair(prompt, avoid, book=book)
            computes = pair.prefill or pair.decode
            _describe(span, computes)
            if span.is_recording():
                span.set_attribute("kvatlas.decode_worker", pair.worker_id)
                span.set_attribute("kvatlas.explanation", json.dumps(pair.explanation(MOST_TRACED)))
        self.counters.pairs += pair.prefill is not None
        self._statistics.count_choice(computes, started_ns)
        if book:
            self._statistics.remember(prompt, computes)
        return pair

    def _block_index(self) -> BlockIndex:
        if not isinstance(self._index, BlockIndex):
            raise NotSupported(f"blocks of {type(self._index).__name__}: it answers overlaps only")
        return self._index

    def _prompt(self, request: Request) -> Prompt:
        if isinstance(request, RequestShape):
            return Prompt.of_shape(request)
        prompt = request if isinstance(request, Prompt) else Prompt.of_hints(request, self.settings.fallbacks)
        expected = prompt.output_tokens if prompt.output_limits is None else self._output_lengths.expect(prompt)
        return prompt if expected == prompt.output_tokens else replace(prompt, output_tokens=expected)


def _describe(span: Span, choice: Choice) -> None:
    result = choice.result
    describe_decision(
        span,
        worker_id=result.worker_id,
        required_blocks=result.required_blocks,
        overlap_blocks=result.overlap_blocks,
        candidates=len(choice.ranking) + choice.ranking.unread,
        applied=[choice.trace],
    )
    if span.is_recording():
        span.set_attribute("kvatlas.usable_tokens", result.usable_tokens)
        span.set_attribute("kvatlas.cost_us", result.score_us)
        span.set_attribute("kvatlas.basis", choice.basis.value)
        if choice.would_be is not None:
            span.set_attribute("kvatlas.would_be", choice.would_be)


async def _prepare(store: Store) -> None:
    """Load the store's functions and build the schema of records. If this were left to the first choice, that choice
    would exceed its deadline."""
    FleetRecord.model_rebuild()
    await asyncio.gather(*(library.prepare(store) for library in (FLEET_LIBRARY, INDEX_LIBRARY, POOL_LIBRARY)))
