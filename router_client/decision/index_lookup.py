"""Looks a prompt up in the index within a decision's deadline. If the index is slow, down or switched off, load decides."""

import asyncio
from time import perf_counter

from kvatlas.store.circuit_breaker import CircuitBreaker
from kvatlas.store.deadline import READ_SHARE, STORE_FAILURES, Deadline
from kvatlas.telemetry import sampled_context
from router_client.basis import Basis
from router_client.counters import RouterCounters
from router_client.decision.case import Case
from router_client.pricing.overlap import OverlapIndex, PromptLookup, look_up_overlap
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt, Strategy

_NO_ANSWER = "index: no recent answer"


class IndexLookup:
    """Calls the index for one router. `load_only` switches it off, and may be set at any time."""

    def __init__(self, index: OverlapIndex, counters: RouterCounters, *, load_only: bool) -> None:
        self.load_only = load_only
        self._index = index
        self._counters = counters
        self._breaker = CircuitBreaker()

    def is_used_for(self, prompt: Prompt) -> bool:
        """True if a choice for this prompt looks up what workers hold and the index is answering."""
        return not (self.load_only or prompt.strategy is Strategy.LOAD or self._breaker.is_open)

    async def look_up(self, prompt: Prompt, pool: Pool) -> PromptLookup:
        """The part of the prompt that each of the pool's workers holds. Raises whatever the store raises."""
        return await look_up_overlap(self._index, prompt, pool.looked_up_shapes)

    async def look_up_in_time(self, prompt: Prompt, pool: Pool, deadline: Deadline, share: float = READ_SHARE) -> Case:
        """Call `look_up` within a share of the deadline; if that fails, return an empty lookup and the reason. After
        failures, choices are made without the index, and another lookup is tried in the background."""
        if self.load_only:
            why = "the router is set to choose by load only"
        elif prompt.strategy is Strategy.LOAD:
            why = "the request asks for a choice by load only"
        elif not self._breaker.may_call():
            why = _NO_ANSWER
        elif self._breaker.is_open:
            deadline.run_behind(self._try_again(prompt, pool, deadline.share_s(share)))
            why = _NO_ANSWER
        else:
            try:
                began = perf_counter()
                lookup = await deadline.wait_for(self.look_up(prompt, pool), share)
                self._counters.lookup_time.add(perf_counter() - began, span=sampled_context())
            except STORE_FAILURES as error:
                self._counters.index_failures += 1
                self._breaker.record_failure()
                why = f"index: {deadline.describe(error)}"
            else:
                self._breaker.record_success()
                return Case(prompt, pool, lookup)
        return Case(prompt, pool, PromptLookup.empty(prompt, pool.looked_up_shapes), Basis.LOAD, why)

    async def _try_again(self, prompt: Prompt, pool: Pool, within_s: float | None) -> None:
        """Retry the lookup, and record whether its answer would have been in time for a choice."""
        try:
            async with asyncio.timeout(within_s):
                await self.look_up(prompt, pool)
        except STORE_FAILURES:
            self._counters.index_failures += 1
            self._breaker.record_failure()
        else:
            self._breaker.record_success()
