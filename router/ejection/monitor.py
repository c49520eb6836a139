"""Ejections in all the pools that a router uses, shared with other routers through the store."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvatlas.ejection.store import SharedEjections
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas_router.ejection.pool_ejections import Avoided, PoolEjections
from kvatlas_router.ejection.retry_budget import RetryBudget, RetryBudgets
from kvatlas_router.upstream.status_verdict import Verdict, judge, retry_after_s

EVERY_S = 1.0
CALL_S = 1.0
LEAST_REST_S = 1.0
"""A refusal that asks for a shorter pause counts as a failure; otherwise the engine would soon get its next request."""
IDLE_S = 60.0
"""A pool that has had no requests for this long is no longer read."""

_log = logging.getLogger("router_client")


@dataclass(slots=True)
class EjectionCounters:
    """Plain integers since the router started. `good`, `bad`: answers that count for or against their workers. `ejections`:
    workers ejected by this router; `readmissions`: workers readmitted after an answered attempt."""

    good: int = 0
    bad: int = 0
    ejections: int = 0
    readmissions: int = 0


@dataclass(slots=True)
class _Pool:
    """`left`: ejected workers that have left the fleet."""

    ejections: PoolEjections
    used_at: float
    asked_at: float = 0.0
    retries: RetryBudgets = field(default_factory=RetryBudgets)
    left: frozenset[str] = frozenset()


class EjectionMonitor:
    """Records answers and names the workers to avoid. Neither of these waits for the store, which receives failures within a
    millisecond and is read every second. While the store is down, each router uses only its own answers."""

    def __init__(
        self,
        shared: SharedEjections,
        router_id: str,
        members: Callable[[str], Awaitable[Collection[str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members`: returns the workers of the pool with the given id, including those that get no requests now."""
        self.counters = EjectionCounters()
        self._shared = shared
        self._router_id = router_id
        self._members = members
        self._clock = clock
        self._pools: dict[str, _Pool] = {}
        self._wake = asyncio.Event()
        self._task = BackgroundTask(self._run, "kvatlas ejections")

    def suspects(self, pool_id: str) -> bool:
        """True if the pool has any worker to avoid. Called for every request to the pool."""
        ejections, now = self._ejections(pool_id), self._clock()
        self._pools[pool_id].used_at = now
        return ejections.has_suspects(now)

    def avoid(self, pool_id: str, candidates: Collection[str]) -> Avoided:
        """See `PoolEjections.avoid`."""
        return self._ejections(pool_id).avoid(candidates, self._clock())

    def retry_budget(self, pool_id: str, tenant_id: str | None = None) -> RetryBudget:
        """This router's retry budget for a pool and tenant. Each pool and tenant has its own, so that the failures of one don't
        use up the budget of another."""
        self._ejections(pool_id)
        return self._pools[pool_id].retries.of(tenant_id)

    def record_sent(self, pool_id: str, worker_id: str) -> None:
        """Record that a request is being sent to this worker."""
        self._ejections(pool_id).record_sent(worker_id, self._clock())

    def record_good(self, pool_id: str, worker_id: str) -> None:
        """Record that the worker began a successful answer."""
        self.counters.good += 1
        self._ejections(pool_id).record_good(worker_id, self._clock())

    def record_complete(self, pool_id: str, worker_id: str) -> None:
        """Record that an answer of the worker is complete."""
        if self._ejections(pool_id).record_complete(worker_id, self._clock()):
            self.counters.readmissions += 1
            _log.info("worker %s: answers again; readmitted", worker_id)
            self._wake.set()

    def record_bad(self, pool_id: str, worker_id: str, why: str, *, unreachable: bool = False) -> None:
        """Record that a request failed at this worker."""
        self.counters.bad += 1
        ejections, now = self._ejections(pool_id), self._clock()
        if seconds := ejections.record_bad(worker_id, now, unreachable=unreachable):
            self.counters.ejections += 1
            bad, total = ejections.rate_of(worker_id, now)
            _log.warning(
                "worker %s: %.0f of its last %.0f answers failed (%s); ejected for %g s",
                worker_id,
                bad,
                total,
                why,
                seconds,
            )
        self._wake.set()

    def record_status(
        self, pool_id: str, worker_id: str, status: int, headers: Iterable[tuple[bytes, bytes]], why: str = ""
    ) -> Verdict:
        """Record an answer's status and return the verdict; `why`: the failure in words. A worker that sent Retry-After is
        avoided until that time. A refusal is doubtful if other workers refuse a far smaller share."""
        verdict = judge(status)
        if verdict is Verdict.ANSWERED:
            self.record_good(pool_id, worker_id)
        elif verdict is Verdict.REFUSED:
            if self._ejections(pool_id).record_refused(worker_id, self._clock()):
                verdict = Verdict.DOUBTFUL
        elif verdict is Verdict.DOUBTFUL:
            self.record_unknown(pool_id, worker_id)
        elif status in (429, 503) and (seconds := retry_after_s(headers) or 0.0) >= LEAST_REST_S:
            self.rest(pool_id, worker_id, seconds)
            self.record_unknown(pool_id, worker_id)
        else:
            self.record_bad(pool_id, worker_id, why or f"status {status}")
        return verdict

    def record_unknown(self, pool_id: str, worker_id: str) -> None:
        """Record that a request ended without evidence about its worker."""
        self._ejections(pool_id).record_unknown(worker_id)

    def rest(self, pool_id: str, worker_id: str, seconds: float) -> None:
        """Avoid the worker for this long, as its engine asked."""
        self._ejections(pool_id).rest(worker_id, seconds, self._clock())

    def ejected(self) -> Mapping[str, float]:
        """Ejected workers in all pools, with the seconds left (0 or less: half open). Workers that have left the fleet are not
        included, though they are remembered in case they return."""
        now = self._clock()
        pools = list(self._pools.values())  # metrics are read on another thread
        return {
            id: seconds for pool in pools for id, seconds in pool.ejections.ejected(now).items() if id not in pool.left
        }

    @property
    def ejected_workers(self) -> int:
        """Number of ejected workers."""
        return len(self.ejected())

    def start(self) -> None:
        """Start sharing."""
        self._task.start()

    async def stop(self) -> None:
        """Stop sharing."""
        await self._task.stop()

    async def exchange(self, pool_id: str) -> None:
        """Share and read once. Raises whatever the store raises; changes that could not be shared are then kept."""
        pool, now = self._pools[pool_id], self._clock()
        for worker_id in pool.ejections.ended_trials(now):
            self.record_complete(pool_id, worker_id)
        changes = pool.ejections.take_changes(now, used=pool.used_at > pool.asked_at)
        pool.asked_at = now
        shared = False
        try:
            async with asyncio.timeout(CALL_S):
                records = await self._shared.exchange(pool_id, self._router_id, changes)
            shared = True
        finally:
            if not shared:
                pool.ejections.put_back(changes, self._clock())
        pool.ejections.update(records, self._router_id, self._clock())
        if ejected := pool.ejections.ejected(self._clock()):
            pool.left = frozenset(ejected.keys() - await self._members(pool_id))

    async def _run(self) -> None:
        while self._task.running:
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            for pool_id, pool in list(self._pools.items()):
                if self._clock() - pool.used_at > IDLE_S:
                    del self._pools[pool_id]
                    continue
                try:
                    await self.exchange(pool_id)
                except STORE_FAILURES as error:
                    _log.debug("pool %s: ejections were not shared (%s); trying again", pool_id, reason(error))
                    self._wake.clear()

    def _ejections(self, pool_id: str) -> PoolEjections:
        pool = self._pools.get(pool_id)
        if pool is None:
            pool = self._pools[pool_id] = _Pool(PoolEjections(), self._clock())
            self._wake.set()
        return pool.ejections
