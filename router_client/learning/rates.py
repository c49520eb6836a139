"""Rates learned from the requests that this router finished, shared with all others through the store.

Nothing of it is on the way of a request: what is finished is only noted, and once a second evidence of it is told to the
store and what all routers told is read back. Prices change with the next reading of the pool's records.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence

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
from kvatlas.store.connection import reason
from router_client.counters import RouterCounters
from router_client.decision.fail_open import FAILING
from router_client.learning.rate_metrics import RateMetrics
from router_client.learning.timings import Timings
from router_client.pricing.ranking import IN_FLIGHT, Ranked
from router_client.settings import RouterSettings
from router_client.tokens.usage import Usage

FIRST_READ_S = 1.0
CLOSE_S = 1.0
MOST_NOTED = 512
"""The last so many requests are looked at in one turn, which takes 0.1 ms each: rates change slowly."""
MOST_A_WORKER = 64
"""Of them so many of one worker."""
WITHOUT_A_BREAK = 8
"""Estimates made before other tasks get their turn; each takes 0.3 ms."""

_log = logging.getLogger("router_client")


class PoolRates:
    """A pool's rates as this router knows them: what all routers told, and what it has not told yet."""

    def __init__(self, configured: EngineProfile) -> None:
        self.profile = configured
        self.learned: dict[str, LearnedRates] = {}
        self._configured = configured
        self._told: Mapping[str, Evidence] = {}
        self._untold: dict[str, Evidence] = {}
        self._estimates: dict[str, Estimate] = {}
        self._shown: dict[str, Estimate] = {}

    def add(self, request: FinishedRequest) -> bool:
        """Learn from a request; False where it says nothing."""
        worker_id = request.plan.worker_id
        rows = rows_of(request)
        if not rows:
            return False
        one = Evidence.of(rows, self._estimate(worker_id))
        self._untold[worker_id] = self._untold.get(worker_id, Evidence()).followed_by(one)
        return True

    def take(self) -> Mapping[str, Evidence]:
        """What is to be told."""
        untold, self._untold = self._untold, {}
        return untold

    def put_back(self, untold: Mapping[str, Evidence]) -> None:
        """It could not be told, or nobody knows whether it was: it is told again. Twice told, it only counts twice."""
        for worker_id, evidence in untold.items():
            self._untold[worker_id] = evidence.followed_by(self._untold.get(worker_id, Evidence()))

    async def hear(self, told: Mapping[str, Evidence]) -> None:
        """What all routers told so far."""
        self._told = told
        gone = self.learned.keys() - told.keys()
        for worker_id in gone:
            del self.learned[worker_id], self._shown[worker_id]
        for worker_id in self._estimates.keys() - told.keys() - self._untold.keys():
            del self._estimates[worker_id]
        changed = 0
        for worker_id in told:
            estimate = self._estimate(worker_id)
            if estimate is not self._shown.get(worker_id):
                self._shown[worker_id] = estimate
                self.learned[worker_id] = learned_rates_of(estimate, self._rates(worker_id))
                changed += 1
                if changed % WITHOUT_A_BREAK == 0:
                    await asyncio.sleep(0)
        if changed or gone:
            self.profile = with_learned_rates(self._configured, self.learned, Evidence.sum_of(told.values()))

    def _estimate(self, worker_id: str) -> Estimate:
        """By all that is known here; made anew when that has grown enough to matter."""
        told, untold = self._told.get(worker_id, Evidence()), self._untold.get(worker_id, Evidence())
        requests = told.requests + untold.requests
        made = self._estimates.get(worker_id)
        if made is None or not 0 <= requests - made.requests <= min(made.requests // 16, 16):
            made = self._estimates[worker_id] = estimate_of(told.followed_by(untold), self._rates(worker_id))
        return made

    def _rates(self, worker_id: str) -> EngineRates:
        return self._configured.by_worker.get(worker_id, self._configured.rates)


class RateLearner:
    """For one router. It learns while it is started; what others learned it reads with a pool's first records anyway."""

    def __init__(self, reservations: Reservations, settings: RouterSettings, counters: RouterCounters) -> None:
        self._reservations = reservations
        self._settings = settings.learning
        self._profile = settings.profile
        self._counters = counters
        self._pools: dict[str, PoolRates] = {}
        self._noted: deque[tuple[str, FinishedRequest]] = deque(maxlen=MOST_NOTED)
        self._last: dict[str, Ranked] = {}
        self._metrics = RateMetrics()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def learned(self, pool_id: str) -> Mapping[str, LearnedRates]:
        """What was learned of a pool's workers, as of the last exchange with the store."""
        rates = self._pools.get(pool_id)
        return dict(rates.learned) if rates is not None else {}

    async def profile(self, pool_id: str) -> CostProfile:
        """What prices the pool's workers now. Waits for the store only when a pool is met for the first time."""
        if not self._settings.on or not isinstance(self._profile, EngineProfile):
            return self._profile
        rates = self._pools.get(pool_id)
        if rates is None:
            rates = self._pools[pool_id] = PoolRates(self._profile)
            try:
                async with asyncio.timeout(FIRST_READ_S):
                    await rates.hear(await self._reservations.read_evidence(pool_id))
            except FAILING as error:
                _log.warning("learned rates of pool %s not read: %s; prices are as configured", pool_id, reason(error))
        return rates.profile

    def feedback(self, pool_id: str, results: Sequence[SelectionResult], chosen: SelectionResult) -> "Feedback | None":
        """For a choice: where its end is told. None where nothing is learned."""
        if pool_id not in self._pools or not isinstance(results, Ranked):
            return None
        self._last[pool_id] = results
        return Feedback(self, pool_id, results, chosen)

    def note(self, pool_id: str, results: Ranked, chosen: SelectionResult, usage: Usage, timings: Timings) -> None:
        """A request ended well."""
        if chosen.plan is None:
            return
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
        """Begin to tell and to listen."""
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name="kvatlas router rates")

    async def stop(self) -> None:
        """Tell what is left. Waits at most CLOSE_S for the store."""
        if self._task is None:
            return
        self._stopping = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        self._metrics.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._add_noted()
                for pool_id, rates in self._pools.items():
                    await self._tell(pool_id, rates)
        except FAILING as error:
            _log.warning("what was learned last is lost: %s", reason(error))

    async def _run(self) -> None:
        while not self._stopping:  # Python 3.11's wait_for, inside redis-py, may swallow the cancellation
            await asyncio.sleep(self._settings.every_s)
            await self._add_noted()
            for pool_id, rates in list(self._pools.items()):
                try:
                    async with asyncio.timeout(max(self._settings.every_s, FIRST_READ_S)):
                        await self._tell(pool_id, rates)
                        await rates.hear(await self._reservations.read_evidence(pool_id))
                    self._metrics.show(pool_id, rates.learned)
                except FAILING as error:
                    _log.warning("learned rates of pool %s not shared: %s", pool_id, reason(error))

    async def _add_noted(self) -> None:
        noted, self._noted = self._noted, deque(maxlen=MOST_NOTED)
        looked_at: Counter[tuple[str, str]] = Counter()
        for number, (pool_id, request) in enumerate(noted):
            worker = pool_id, request.plan.worker_id
            looked_at[worker] += 1
            if looked_at[worker] > MOST_A_WORKER:
                continue
            if self._pools[pool_id].add(request):
                self._counters.learned += 1
            else:
                self._counters.said_nothing += 1
            if number % WITHOUT_A_BREAK == WITHOUT_A_BREAK - 1:
                await asyncio.sleep(0)

    async def _tell(self, pool_id: str, rates: PoolRates) -> None:
        untold = rates.take()
        if not untold:
            return
        told = False
        try:
            await self._reservations.add_evidence(pool_id, untold)
            told = True
        finally:
            if not told:
                rates.put_back(untold)


class Feedback:
    """Where the end of one choice is told, once."""

    __slots__ = ("_chosen", "_learner", "_pool_id", "_results", "_told")

    def __init__(self, learner: RateLearner, pool_id: str, results: Ranked, chosen: SelectionResult) -> None:
        self._learner = learner
        self._pool_id = pool_id
        self._results = results
        self._chosen = chosen
        self._told = False

    def finished(self, usage: Usage, timings: Timings) -> None:
        """The request ended well; told again it changes nothing."""
        if not self._told:
            self._told = True
            self._learner.note(self._pool_id, self._results, self._chosen, usage, timings)
