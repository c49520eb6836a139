"""Compares engines' answers with the predictions, counts them by pool, and reports the counts to the store.

This is where a wrong tokenizer shows up first. `kvatlas doctor` reads the reports of all routers
(`kvatlas.predictions.store`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic

from kvatlas.fleet.records import EngineEndpoint
from kvatlas.identity import Scope
from kvatlas.predictions.accuracy import (
    MAX_FOREIGN_TENANTS,
    MAX_STALLED,
    AnswerCounts,
    AnswerReport,
    ForeignTenant,
    Prediction,
)
from kvatlas.predictions.condition import RouterCondition
from kvatlas.predictions.recent_counts import RecentCounts
from kvatlas.request import SelectionResult
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from router_client.basis import Basis
from router_client.learning.token_counts import Usage
from router_client.prompt import Prompt

REPORT_S = 2.0
"""Interval of reports; unchanged ones are repeated because the store expires reports after 60 s."""
CALL_S = 1.0
LATELY_S = 60.0
"""How long a request that went to another tenant's worker continues to be reported."""

BY_INDEX = (Basis.COST.value, Basis.POLICY.value)
"""Modes of the choices that used the index."""

Report = Callable[[str, AnswerReport], Awaitable[None]]
"""Stores the counts for the pool with the given id."""

_log = logging.getLogger("router_client")


@dataclass(slots=True)
class _ForeignRequests:
    """Requests of one tenant to workers of another."""

    requests: int = 0
    worker_id: str = ""
    last_s: float = 0.0


@dataclass(slots=True)
class PredictionAccuracy:
    """Counts each answer, in total and by pool, and describes each problem in one line."""

    counts: AnswerCounts = field(default_factory=AnswerCounts)
    stalled_by_pool: Callable[[], Mapping[str, Sequence[str]]] = dict
    """Workers, by pool, that a server built on this library considers stalled; they are included in the reports."""
    condition: Callable[[], RouterCondition | None] = lambda: None
    """The condition of the whole router, which is included in the reports."""
    known_pools: Callable[[], Collection[str]] = tuple
    """Pools that are reported even before their first answer."""
    _recent: dict[str, RecentCounts] = field(default_factory=dict)
    _pools: dict[str, AnswerCounts] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)
    _prompt_tokens: dict[str, int] = field(default_factory=dict)
    _foreign: dict[str, dict[tuple[str, str], _ForeignRequests]] = field(default_factory=dict)

    def count(self, pool_id: str, predicted: Prediction, usage: Usage) -> None:
        """Count one answer to a single prompt."""
        self.counts.add(predicted, usage.prompt_tokens, usage.cached_tokens)
        self._pools.setdefault(pool_id, AnswerCounts()).add(predicted, usage.prompt_tokens, usage.cached_tokens)
        if predicted.prompt_tokens is not None and usage.cached_tokens is not None:
            self._prompt_tokens[pool_id] = self._prompt_tokens.get(pool_id, 0) + usage.prompt_tokens
        if predicted.prompt_tokens not in (None, usage.prompt_tokens):
            self._examples[pool_id] = f"{usage.prompt_tokens} tokens where the router counted {predicted.prompt_tokens}"

    def record(
        self, prompt: Prompt, chosen: SelectionResult, endpoint: EngineEndpoint, basis: Basis, usage: Usage
    ) -> None:
        """Count the answer to a prompt from the chosen worker, which has this endpoint."""
        known = prompt.input_tokens if prompt.is_whole else None
        predicted = Prediction(
            known,
            chosen.cached_tokens,
            chosen.predicted_tokens,
            by_index=basis in BY_INDEX,
            bounded=bool(endpoint.upper_bound),
        )
        self.count(prompt.scope.pool_id, predicted, usage)
        if endpoint.salt_is_tenant is False and endpoint.events and prompt.scope.tenant_id != endpoint.tenant_id:
            self._record_foreign(prompt.scope, endpoint)

    def _record_foreign(self, scope: Scope, endpoint: EngineEndpoint) -> None:
        of_pool = self._foreign.setdefault(scope.pool_id, {})
        tenants = scope.tenant_id, endpoint.tenant_id
        if tenants not in of_pool and len(of_pool) >= MAX_FOREIGN_TENANTS:
            del of_pool[min(of_pool, key=lambda one: of_pool[one].last_s)]
        found = of_pool.setdefault(tenants, _ForeignRequests())
        found.requests += 1
        found.worker_id, found.last_s = endpoint.id, monotonic()

    def reports(self) -> dict[str, AnswerReport]:
        """The current reports, by pool."""
        stalled, condition = self.stalled_by_pool(), self.condition()
        return {
            pool_id: AnswerReport(
                counts=self._pools.get(pool_id, AnswerCounts()),
                recent=self._recent_counts(pool_id),
                condition=condition,
                example=self._examples.get(pool_id, ""),
                prompt_tokens=self._prompt_tokens.get(pool_id, 0),
                foreign_tenants=tuple(self._foreign_tenants(pool_id)),
                stalled=tuple(stalled.get(pool_id, ())[:MAX_STALLED]),
            )
            for pool_id in self._pools.keys() | stalled.keys() | set(self.known_pools())
        }

    def _recent_counts(self, pool_id: str) -> AnswerCounts:
        counts = self._pools.get(pool_id, AnswerCounts())
        return AnswerCounts(**self._recent.setdefault(pool_id, RecentCounts()).grown(asdict(counts)))

    def _foreign_tenants(self, pool_id: str) -> Iterator[ForeignTenant]:
        since_s = monotonic() - LATELY_S
        for (tenant_id, published), found in self._foreign.get(pool_id, {}).items():
            if found.last_s >= since_s:
                yield ForeignTenant(
                    tenant_id=tenant_id,
                    published_tenant_id=published,
                    worker_id=found.worker_id,
                    requests=found.requests,
                )

    def findings(self) -> list[str]:
        """Problems that need attention, and what to do about them, one line each."""
        found = [pair for report in self.reports().values() for pair in report.findings()]
        return [f"{line}; {advice}" for line, advice in dict.fromkeys(found)]


class AccuracyReporter:
    """Reports the counts of every pool from `start` to `stop`."""

    def __init__(self, accuracy: PredictionAccuracy, report: Report) -> None:
        self._accuracy = accuracy
        self._report = report
        self._task = BackgroundTask(self._run, "kvatlas router answers")

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def _run(self) -> None:
        reachable = True
        while self._task.running:
            await asyncio.sleep(REPORT_S)
            try:
                async with asyncio.timeout(CALL_S):
                    for pool_id, report in self._accuracy.reports().items():
                        await self._report(pool_id, report)
                reachable = True
            except STORE_FAILURES as error:
                if reachable:
                    _log.warning(
                        "prediction accuracy was not reported: %s; trying again every %g s", reason(error), REPORT_S
                    )
                reachable = False
