"""Learns how much of an upper bound engines really reuse, by pool, from the cached tokens in their answers.

For some hybrid models, only residency is known (with SGLang, or for groups of an unknown kind): the resident blocks are an
upper bound on what is reused. Once there are enough answers, the share that was reused for them is applied.
"""

from dataclasses import dataclass, replace

from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.request import SelectionResult
from router_client.learning.token_counts import Usage
from router_client.prompt import Prompt

LEAST_ANSWERS = 20
FADING = 0.99
"""Factor by which an answer's weight shrinks with each later answer; about the last hundred answers matter."""
STEP = 0.05
"""Shares are rounded to multiples of this, so that pools are not rebuilt after each answer."""


@dataclass(slots=True)
class _Answers:
    """Faded sums over the answers of one pool."""

    answers: int = 0
    bound_tokens: float = 0.0
    cached_tokens: float = 0.0

    @property
    def share(self) -> float:
        if self.answers < LEAST_ANSWERS or not self.bound_tokens:
            return 1.0
        return min(1.0, round(self.cached_tokens / self.bound_tokens / STEP) * STEP)


class BoundShares:
    """Gives each worker's rule as configured and, for a worker whose tokens are an upper bound, applies its pool's
    share. `version` changes whenever a share does."""

    def __init__(self, rules: ReuseRules) -> None:
        self.version = 0
        self._rules = rules
        self._pools: dict[str, _Answers] = {}

    def of(self, endpoint: EngineEndpoint) -> ReuseRule:
        """The rule for this worker."""
        rule = self._rules.of(endpoint)
        known = self._pools.get(endpoint.pool_id) if endpoint.upper_bound else None
        return rule if known is None or known.share == 1 else replace(rule, share=known.share)

    def record(self, prompt: Prompt, chosen: SelectionResult, endpoint: EngineEndpoint, usage: Usage) -> None:
        """Learn from an answer from this worker. An answer without cached tokens, or without resident blocks, is
        ignored."""
        if not endpoint.upper_bound or usage.cached_tokens is None:
            return
        readable = prompt.reading.readable_tokens(endpoint.kind)
        bound = self._rules.of(endpoint).usable_tokens(
            chosen.resident_tokens, prompt.input_tokens, endpoint.block_size or 1, readable
        )
        if not bound:
            return
        known = self._pools.setdefault(endpoint.pool_id, _Answers())
        before = known.share
        known.answers += 1
        known.bound_tokens = known.bound_tokens * FADING + bound
        known.cached_tokens = known.cached_tokens * FADING + min(bound, usage.cached_tokens)
        self.version += known.share != before
