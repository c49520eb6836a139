"""The router client: asks the index who holds a prompt, prices every worker of the pool, picks the cheapest."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.fleet import FleetRecord
from kvatlas.fleet_store import FleetStore
from kvatlas.index.redis import open_redis_index
from kvatlas.request import Fallbacks, RequestHints, RequestShape
from kvatlas.reuse import ReuseRules
from kvatlas.store import open_store
from kvatlas.telemetry import decision_span, describe_decision, observe
from kvatlas.tiers import Tier
from router_client.answers import RANK_HEADER, Choice, PromptOverlap, Ranking, WorkerOverlap
from router_client.errors import NoWorkers
from router_client.fleet import MAX_AGE_MS, CachedFleet, FleetReader
from router_client.lookup import NOTHING, HeldPrefix, Lookup, OverlapIndex, look_up
from router_client.picks import RecentPicks
from router_client.pool import Pool
from router_client.prompt import Prompt
from router_client.ranking import rank

Request = Prompt | RequestHints | RequestShape


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How a router ranks. `fallbacks` complete requests given as hints; `rules` say what engines reuse.

    `fleet_max_age_ms`: how long a pool's records are kept. `count_own_picks`: add this client's own picks that workers
    can't have reported yet to their load; then equal requests in a row may go to different workers.
    """

    profile: CostProfile = field(default_factory=EngineProfile)
    rules: ReuseRules = field(default_factory=ReuseRules)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    fleet_max_age_ms: float = MAX_AGE_MS
    count_own_picks: bool = False


@dataclass(slots=True)
class RouterCounters:
    """Plain integers since the client was made; a client from `RouterClient.open` exports them as metrics.

    `lookups`: round trips to the index. `required_blocks` and `overlap_blocks`: of the routed prompts, at the picked
    worker.
    """

    routed: int = 0
    no_workers: int = 0
    lookups: int = 0
    decision_time_us: int = 0
    required_blocks: int = 0
    overlap_blocks: int = 0


class RouterClient:
    """Answers `overlap`, `rank` and `route`; safe to share between tasks of one event loop.

    Every question raises Unreachable where the store does not answer, and InvalidValue for a request that breaks the
    contract. One round trip to the index (see `router_client.chain` for long prompts given as tokens), and at most
    every `fleet_max_age_ms` one for the pool's records.
    """

    def __init__(
        self,
        index: OverlapIndex,
        fleet: FleetReader,
        settings: RouterSettings | None = None,
        *,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        """Over an index and a fleet reader that the caller keeps open; `RouterClient.open` makes both from a URL."""
        self.settings = settings or RouterSettings()
        self.counters = RouterCounters()
        self._index = index
        self._fleet = CachedFleet(fleet, self.settings.fleet_max_age_ms, self.settings.rules)
        self._picks = RecentPicks()
        self._now_us = now_us

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

        `wait`: try an unreachable store again with back-off, telling `on_wait` each time. Raises Unreachable (without
        `wait`), InvalidValue for the URL, LayoutMismatch where the store was laid out by another version or not yet.
        """
        store = await open_store(redis_url, wait=wait, on_wait=on_wait)
        try:
            index = await open_redis_index(store, writer=False)
            client = cls(index, FleetStore(store), settings)
            with observe("router", client.counters):
                yield client
        finally:
            await store.close()

    async def overlap(self, request: Request) -> PromptOverlap:
        """What each worker of the request's pool holds of the prompt, resident and usable, by tier."""
        prompt = self._prompt(request)
        with decision_span("overlap", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            pool, found = await self._look_up(prompt)
            workers = [self._worker_overlap(prompt, record, found.held) for record in pool.records.values()]
            workers.sort(key=lambda worker: (-worker.usable_tokens, -worker.resident_tokens, worker.worker_id))
            describe_decision(span, candidates=len(workers))
        return PromptOverlap(prompt.input_tokens, tuple(workers))

    async def rank(self, request: Request) -> Ranking:
        """Every candidate with every term of its cost, cheapest first; empty without a candidate."""
        prompt = self._prompt(request)
        with decision_span("rank", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            ranking, _ = await self._rank(prompt)
            describe_decision(span, candidates=len(ranking))
        return ranking

    async def route(self, request: Request) -> Choice:
        """The cheapest worker. Ties go by a hash of the prompt and the worker: evenly, and the same from every router.

        Raises NoWorkers.
        """
        prompt = self._prompt(request)
        started_ns = time.perf_counter_ns()
        with decision_span("route", request_id=prompt.id, model_id=prompt.scope.model_id) as span:
            ranking, pool = await self._rank(prompt)
            if not ranking.results:
                self.counters.no_workers += 1
                raise NoWorkers(_why_none(prompt, ranking))
            best = ranking.results[0]
            describe_decision(
                span,
                worker_id=best.worker_id,
                required_blocks=best.required_blocks,
                overlap_blocks=best.overlap_blocks,
                candidates=len(ranking),
                applied=[pool.records[best.worker_id].trace],
            )
            if span.is_recording():
                span.set_attribute("kvatlas.usable_tokens", best.usable_tokens)
                span.set_attribute("kvatlas.cost_us", best.score_us)
        if self.settings.count_own_picks:
            new_tokens = prompt.input_tokens - best.usable_tokens - best.transferred_tokens
            self._picks.add(best.worker_id, new_tokens, prompt.input_tokens, self._now_us())
        counters = self.counters
        counters.routed += 1
        counters.required_blocks += best.required_blocks
        counters.overlap_blocks += best.overlap_blocks
        counters.decision_time_us += (time.perf_counter_ns() - started_ns) // 1_000
        endpoint = pool.records[best.worker_id].endpoint
        headers = {} if endpoint.dp_rank is None else {RANK_HEADER: str(endpoint.dp_rank)}
        return Choice(best.worker_id, endpoint.url, headers, endpoint.role, best, ranking)

    def _prompt(self, request: Request) -> Prompt:
        if isinstance(request, Prompt):
            return request
        if isinstance(request, RequestShape):
            return Prompt.of_shape(request)
        return Prompt.of_hints(request, self.settings.fallbacks)

    async def _look_up(self, prompt: Prompt) -> tuple[Pool, Lookup]:
        pool = await self._fleet.pool(prompt.scope.pool_id)
        found = await look_up(self._index, prompt, pool.groups)
        self.counters.lookups += found.round_trips
        return pool, found

    async def _rank(self, prompt: Prompt) -> tuple[Ranking, Pool]:
        pool, found = await self._look_up(prompt)
        booked = self._picks.booked(pool.records, self._now_us()) if self.settings.count_own_picks else None
        results = rank(prompt, pool, found.held, self.settings.profile, fingerprint=found.fingerprint, booked=booked)
        return Ranking(prompt.input_tokens, results, pool.left_out), pool

    def _worker_overlap(self, prompt: Prompt, record: FleetRecord, held: Mapping[str, HeldPrefix]) -> WorkerOverlap:
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
        )


def _why_none(prompt: Prompt, ranking: Ranking) -> str:
    scope = prompt.scope
    pool = f"pool {scope.pool_id} (model {scope.model_id}, tokenizer {scope.tokenizer_id})"
    if not ranking.left_out:
        return f"{pool} has no workers; is a publisher running for this model and tokenizer?"
    return f"{pool} has no worker that serves prompts now; not serving: {', '.join(ranking.left_out[:8])}"
