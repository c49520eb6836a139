"""Rates learned from the requests that this router has finished, and shared with all other routers through the store.

Learning delays no request: a finished request is only noted. Once a second its evidence is added to the store, and the
evidence of all routers is read back. Prices change with the next read of the pool's records.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import exp

from kvatlas.cost import CostProfile, EngineProfile, EngineRates
from kvatlas.cost.learned_rates import (
    FinishedRequest,
    LearnedRates,
    estimate_of,
    learned_rates_of,
    rows_of,
    with_learned_rates,
)
from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import Estimate, Evidence
from kvatlas.request import SelectionResult
from kvatlas.reservations import Reservations
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from router_client.counters import RouterCounters
from router_client.learning.rate_metrics import RateMetrics
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.pricing.ranking import IN_FLIGHT, RankedResults
from router_client.settings import RouterSettings

FIRST_READ_S = 1.0
CLOSE_S = 1.0
MOST_NOTED = 512
"""Maximum number of requests learned from in one turn, at 0.1 ms each. Only the last ones are used; rates change
slowly."""
MOST_A_WORKER = 64
"""Maximum number of these requests per worker; the first ones in a turn count."""
MISSED = 12.0
FADES_IN = 16.0
"""A worker's evidence begins to fade when it has missed MISSED requests, compared with an equal share of its pool's
requests. After FADES_IN more, a third of it is left."""
STEPS = 4
"""Number of steps in which a worker's evidence fades; its rates are estimated again at each step."""
ESTIMATES_A_SLICE = 8
"""Number of estimates, at 0.3 ms each, that are made before other tasks get a turn."""

_log = logging.getLogger("router_client")


class Starvation:
    """Finds workers that get no new evidence while others in their pool do, and determines how much of their old evidence
    still counts.

    A worker that was learned to be slow gets no requests, and without requests it would look slow forever. So a worker's
    evidence fades while its pool learns from others, until it is priced like its pool and gets requests again. Time alone
    does not make it fade: a pool that is idle overnight keeps its rates.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._total = 0

    def update(self, shared: Mapping[str, Evidence]) -> None:
        """Update with the evidence of all routers so far."""
        self._total = sum(one.requests for one in shared.values())
        known, self._last = self._last, {}
        for worker_id, one in shared.items():
            requests, total = known.get(worker_id, (one.requests, self._total))
            self._last[worker_id] = (requests, total) if requests == one.requests else (one.requests, self._total)

    def kept(self, worker_id: str) -> float:
        """The share of a worker's evidence that still counts, in steps."""
        if worker_id not in self._last:
            return 1.0
        missed = max(0, self._total - self._last[worker_id][1]) / len(self._last)
        return exp(-max(0, int(STEPS * (missed - MISSED) / FADES_IN)) / STEPS)


class PoolRates:
    """A pool's rates as known to this router, from the evidence of all routers plus its own evidence that has not been
    shared yet."""

    def __init__(self, configured: EngineProfile) -> None:
        self.profile = configured
        self.learned: dict[str, LearnedRates] = {}
        self._configured = configured
        self._shared: Mapping[str, Evidence] = {}
        self._unshared: dict[str, Evidence] = {}
        self._estimates: dict[str, Estimate] = {}
        self._published: dict[str, tuple[Estimate, Estimate, float]] = {}
        self._pool: Estimate | None = None
        self._starvation = Starvation()

    def add(self, request: FinishedRequest) -> bool:
        """Learn from a request. Returns False if it provides no evidence."""
        worker_id = request.plan.worker_id
        rows = rows_of(request)
        if not rows:
            return False
        own = self._estimate(worker_id)
        kept = 1.0 if worker_id in self._unshared else self._starvation.kept(worker_id)
        evidence = Evidence.of(rows, own if self._pool is None else own.shrunk(self._pool, kept)).fading(kept)
        self._unshared[worker_id] = self._unshared.get(worker_id, Evidence()).followed_by(evidence)
        return True

    def take_unshared(self) -> Mapping[str, Evidence]:
        """The evidence to share now, by worker; it counts as shared from here on."""
        unshared, self._unshared = self._unshared, {}
        return unshared

    def put_back(self, unshared: Mapping[str, Evidence]) -> None:
        """Take back evidence that the store did not confirm, to share it again. If the store did receive it, it merely
        counts twice."""
        for worker_id, evidence in unshared.items():
            self._unshared[worker_id] = evidence.followed_by(self._unshared.get(worker_id, Evidence()))

    async def update(self, shared: Mapping[str, Evidence]) -> None:
        """Update the estimates with the evidence of all routers so far."""
        self._shared = shared
        gone = self.learned.keys() - shared.keys()
        for worker_id in gone:
            del self.learned[worker_id], self._published[worker_id]
        for worker_id in self._estimates.keys() - shared.keys() - self._unshared.keys():
            del self._estimates[worker_id]
        self._starvation.update(shared)
        together = Evidence.sum_of(shared.values())
        if self._pool is None or _is_outdated(self._pool, together):
            self._pool = estimate_of(together, self._configured.rates)
        changed = 0
        for worker_id in shared:
            basis = self._estimate(worker_id), self._pool, self._starvation.kept(worker_id)
            if basis != self._published.get(worker_id):
                self._published[worker_id] = basis
                estimate = basis[0].shrunk(*basis[1:])
                self.learned[worker_id] = learned_rates_of(estimate, self._configured_rates(worker_id))
                changed += 1
                if changed % ESTIMATES_A_SLICE == 0:
                    await asyncio.sleep(0)
        if changed or gone:
            self.profile = with_learned_rates(self._configured, self.learned, together)

    def _estimate(self, worker_id: str) -> Estimate:
        """The estimate from all evidence known here. It is renewed when that evidence has changed enough to matter."""
        evidence = self._shared.get(worker_id, Evidence())
        if (unshared := self._unshared.get(worker_id)) is not None:
            evidence = evidence.followed_by(unshared)
        known = self._estimates.get(worker_id)
        if known is None or _is_outdated(known, evidence):
            known = self._estimates[worker_id] = estimate_of(evidence, self._configured_rates(worker_id))
        return known

    def _configured_rates(self, worker_id: str) -> EngineRates:
        return self._configured.by_worker.get(worker_id, self._configured.rates)


def _is_outdated(known: Estimate, evidence: Evidence) -> bool:
    """True if the evidence has grown or faded enough to matter."""
    grown = evidence.requests - known.requests
    return evidence.weight < known.weight / 2 or not 0 <= grown <= min(known.requests // 16, 16)


class RateLearner:
    """Learns for one router from `start` to `stop`. In any case, other routers' evidence is read together with a pool's
    first records."""

    def __init__(self, reservations: Reservations, settings: RouterSettings, counters: RouterCounters) -> None:
        self._reservations = reservations
        self._settings = settings.learning
        self._profile = settings.profile
        self._counters = counters
        self._pools: dict[str, PoolRates] = {}
        self._noted: deque[tuple[str, FinishedRequest]] = deque(maxlen=MOST_NOTED)
        self._noted_of: Counter[tuple[str, str]] = Counter()
        self._last: dict[str, RankedResults] = {}
        self._metrics = RateMetrics()
        self._task = BackgroundTask(self._run, "kvatlas router rates")

    def learned(self, pool_id: str) -> Mapping[str, LearnedRates]:
        """The rates learned for a pool's workers, as of the last exchange with the store."""
        rates = self._pools.get(pool_id)
        return dict(rates.learned) if rates is not None else {}

    async def profile(self, pool_id: str) -> CostProfile:
        """The current prices of the pool's workers. Only a pool's first prices require waiting for the store."""
        if not self._settings.on or not isinstance(self._profile, EngineProfile):
            return self._profile
        rates = self._pools.get(pool_id)
        if rates is None:
            rates = self._pools[pool_id] = PoolRates(self._profile)
            try:
                async with asyncio.timeout(FIRST_READ_S):
                    await rates.update(await self._reservations.read_evidence(pool_id))
            except STORE_FAILURES as error:
                _log.warning(
                    "pool %s: learned rates were not read (%s); using the configured rates", pool_id, reason(error)
                )
        return rates.profile

    def feedback(self, pool_id: str, results: Sequence[SelectionResult], chosen: SelectionResult) -> "Feedback | None":
        """Return a recorder for the end of a choice; None if nothing is learned."""
        if pool_id not in self._pools or not isinstance(results, RankedResults):
            return None
        self._last[pool_id] = results
        return Feedback(self, pool_id, results, chosen)

    def note(
        self, pool_id: str, results: RankedResults, chosen: SelectionResult, usage: Usage, timings: Timings
    ) -> None:
        """Note a request that ended well; the background task learns from it."""
        worker = pool_id, chosen.worker_id
        if chosen.plan is None or self._noted_of[worker] == MOST_A_WORKER:
            return
        self._noted_of[worker] += 1
        last = self._last.get(pool_id, results)
        after: Load | None = None if last is results else last.load_of(chosen.worker_id)
        finished = FinishedRequest(
            plan=chosen.plan,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            load_known=chosen.load_known,
            waited=IN_FLIGHT in chosen.cost.kinds,
            load_after=after,
            ttft_us=timings.ttft_us,
            tpot_us=timings.tpot_us,
        )
        self._noted.append((pool_id, finished))

    def start(self) -> None:
        """Start learning and sharing."""
        self._task.start()

    async def stop(self) -> None:
        """Stop, and share the rest. Waits at most CLOSE_S for the store."""
        if not await self._task.stop():
            return
        self._metrics.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._add_noted()
                for pool_id, rates in self._pools.items():
                    await self._share(pool_id, rates)
        except STORE_FAILURES as error:
            _log.warning("the last learned rates were not shared with other routers and are lost (%s)", reason(error))

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(self._settings.every_s)
            await self._add_noted()
            for pool_id, rates in list(self._pools.items()):
                try:
                    async with asyncio.timeout(max(self._settings.every_s, FIRST_READ_S)):
                        await self._share(pool_id, rates)
                        await rates.update(await self._reservations.read_evidence(pool_id))
                    self._metrics.export(pool_id, rates.learned)
                except STORE_FAILURES as error:
                    _log.warning(
                        "pool %s: learned rates were not shared (%s); trying again in %g s",
                        pool_id,
                        reason(error),
                        self._settings.every_s,
                    )

    async def _add_noted(self) -> None:
        noted, self._noted = self._noted, deque(maxlen=MOST_NOTED)
        self._noted_of.clear()
        for number, (pool_id, request) in enumerate(noted):
            if self._pools[pool_id].add(request):
                self._counters.learned += 1
            else:
                self._counters.said_nothing += 1
            if number % ESTIMATES_A_SLICE == ESTIMATES_A_SLICE - 1:
                await asyncio.sleep(0)

    async def _share(self, pool_id: str, rates: PoolRates) -> None:
        unshared = rates.take_unshared()
        if not unshared:
            return
        shared = False
        try:
            await self._reservations.add_evidence(pool_id, unshared)
            shared = True
        finally:
            if not shared:
                rates.put_back(unshared)


class Feedback:
    """Records the end of one choice, once."""

    __slots__ = ("_chosen", "_learner", "_pool_id", "_recorded", "_results")

    def __init__(self, learner: RateLearner, pool_id: str, results: RankedResults, chosen: SelectionResult) -> None:
        self._learner = learner
        self._pool_id = pool_id
        self._results = results
        self._chosen = chosen
        self._recorded = False

    def record(self, usage: Usage, timings: Timings) -> None:
        """Record that the request ended well; a second call does nothing."""
        if not self._recorded:
            self._recorded = True
            self._learner.note(self._pool_id, self._results, self._chosen, usage, timings)
