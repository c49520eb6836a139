"""What engines say in their answers beside what was predicted, counted by pool and told to the store.

A wrong tokenizer shows here first. `kvatlas doctor` reads what every router told (`kvatlas.predictions.store`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvatlas.predictions.accuracy import AnswerCounts, AnswerReport, Prediction
from kvatlas.request import SelectionResult
from router_client.decision.fail_open import FAILING, Basis
from router_client.prompt import Prompt
from router_client.tokens.usage import Usage

EVERY_S = 2.0
"""Told so often, also where nothing changed: what is told is kept for a minute."""
ANSWER_S = 1.0

BY_INDEX = (Basis.COST.value, Basis.POLICY.value)
"""Modes of a choice in which the index was asked."""

Tell = Callable[[str, AnswerReport], Awaitable[None]]
"""Tells the counts of a pool."""

_log = logging.getLogger("router_client")


@dataclass(slots=True)
class AnswerComparison:
    """Counts each answer, in all and by pool, and says in one line what is wrong, if something is."""

    counts: AnswerCounts = field(default_factory=AnswerCounts)
    _pools: dict[str, AnswerCounts] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)

    def add(self, pool_id: str, predicted: Prediction, usage: Usage) -> None:
        """One answer to a single prompt."""
        self.counts.add(predicted, usage.prompt_tokens, usage.cached_tokens)
        self._pools.setdefault(pool_id, AnswerCounts()).add(predicted, usage.prompt_tokens, usage.cached_tokens)
        if predicted.prompt_tokens not in (None, usage.prompt_tokens):
            self._examples[pool_id] = f"{usage.prompt_tokens} tokens where the router counted {predicted.prompt_tokens}"

    def answered(self, prompt: Prompt, chosen: SelectionResult, basis: Basis, usage: Usage) -> None:
        """The answer to a prompt, from the worker that was chosen."""
        known = prompt.input_tokens if prompt.tokens is not None or prompt.hashes else None
        predicted = Prediction(known, chosen.cached_tokens, chosen.predicted_tokens, basis.value in BY_INDEX)
        self.add(prompt.scope.pool_id, predicted, usage)

    def reports(self) -> dict[str, AnswerReport]:
        """By pool, as it is now."""
        return {
            pool_id: AnswerReport(counts=counts, example=self._examples.get(pool_id, ""))
            for pool_id, counts in self._pools.items()
        }

    def findings(self) -> list[str]:
        """What somebody should look at, a line each; empty where nothing is."""
        found = [pair for report in self.reports().values() for pair in report.findings()]
        return [f"{line}; {advice}" for line, advice in dict.fromkeys(found)]


class AnswerTelling:
    """`start`, then `stop`: tells the counts all the while."""

    def __init__(self, comparison: AnswerComparison, tell: Tell) -> None:
        self._comparison = comparison
        self._tell = tell
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name="kvatlas router answers")

    async def stop(self) -> None:
        """Tell no more."""
        if self._task is not None:
            self._stopping = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        reachable = True
        while not self._stopping:  # Python 3.11's wait_for, inside redis-py, may swallow the cancellation
            await asyncio.sleep(EVERY_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    for pool_id, report in self._comparison.reports().items():
                        await self._tell(pool_id, report)
                reachable = True
            except FAILING as error:
                if reachable:
                    _log.warning("counts of answers are not told: %s", error or "no answer in time")
                reachable = False
