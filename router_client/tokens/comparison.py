"""What engines say of prompts beside what the router took them for: a wrong tokenizer shows here first."""

from dataclasses import dataclass, field

from kvatlas.answers import AnswerCounts, AnswerReport, Prediction
from router_client.tokens.usage import Usage


@dataclass(slots=True)
class TokenCounters:
    """How requests came by their token ids: plain integers since the router began.

    `tokenized`, `given` (token ids in the request itself), and those without tokens by reason: `late`, `busy`,
    `unsupported`, `failed`.
    """

    tokenized: int = 0
    given: int = 0
    late: int = 0
    busy: int = 0
    unsupported: int = 0
    failed: int = 0
    time_us: int = 0


@dataclass(slots=True)
class TokenComparison:
    """Counts each answer, in all and by pool, and says in one line what is wrong, if something is."""

    counters: TokenCounters = field(default_factory=TokenCounters)
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    _pools: dict[str, AnswerCounts] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)

    def add(self, pool_id: str, predicted: Prediction, usage: Usage) -> None:
        """One answer to a single prompt."""
        self.answers.add(predicted, usage.prompt_tokens, usage.cached_tokens)
        self._pools.setdefault(pool_id, AnswerCounts()).add(predicted, usage.prompt_tokens, usage.cached_tokens)
        if predicted.prompt_tokens not in (None, usage.prompt_tokens):
            self._examples[pool_id] = f"{usage.prompt_tokens} tokens where the router counted {predicted.prompt_tokens}"

    def reports(self) -> dict[str, AnswerReport]:
        """By pool, as it is now."""
        return {
            pool_id: AnswerReport(counts=counts, example=self._examples.get(pool_id, ""))
            for pool_id, counts in self._pools.items()
        }

    def findings(self) -> list[str]:
        """What somebody should look at, a line each; empty where nothing is."""
        found = [pair for report in self.reports().values() for pair in report.findings()]
        lines = [f"{line}; {advice}" for line, advice in dict.fromkeys(found)]
        counters = self.counters
        without = counters.late + counters.busy + counters.failed
        if without > counters.tokenized // 20:
            lines.append(
                f"{without} requests were routed without their tokens ({counters.late} late, {counters.busy} too many at "
                f"once, {counters.failed} failed)"
            )
        return lines
