"""What the router client answers: overlaps, a ranking, a choice; each can explain itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.cost.plan import Cost
from kvatlas.fleet import Role
from kvatlas.request import SelectionResult
from kvatlas.tiers import Tier

RANK_HEADER = "X-Data-Parallel-Rank"


@dataclass(frozen=True, slots=True)
class WorkerOverlap:
    """What one worker holds of a prompt. Blocks are of its own size; `block_size` 0: it has announced nothing yet.

    `resident_tokens` is a lower bound where the worker announces only every g-th block; `usable_tokens` of them its
    engine will really reuse. `tokens_by_tier` counts each token once, in its nearest tier. `routable`: it may get
    requests now.
    """

    worker_id: str
    block_size: int
    required_blocks: int
    resident_blocks: int
    resident_tokens: int
    usable_blocks: int
    usable_tokens: int
    tokens_by_tier: Mapping[Tier, int]
    routable: bool = True

    def explain(self) -> str:
        tiers = ", ".join(f"{tokens} in {tier.label}" for tier, tokens in self.tokens_by_tier.items())
        text = f"{self.worker_id}: {self.resident_blocks} of {self.required_blocks} blocks"
        text += f", {self.resident_tokens} tokens resident ({tiers}), {self.usable_tokens} usable" if tiers else ""
        return text if self.routable else text + " (gets no requests now)"


@dataclass(frozen=True, slots=True)
class PromptOverlap:
    """What a pool holds of a prompt: every worker of the pool, the most usable tokens first."""

    input_tokens: int
    workers: Sequence[WorkerOverlap]

    def __iter__(self) -> Iterator[WorkerOverlap]:
        return iter(self.workers)

    def of(self, worker_id: str) -> WorkerOverlap | None:
        """One worker's; None for a worker that is not of the pool."""
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)

    def explain(self) -> str:
        lines = [f"prompt of {self.input_tokens} tokens", *(worker.explain() for worker in self.workers)]
        return "\n  ".join(lines)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every candidate with its cost, cheapest first; empty without one. `left_out`: workers that get no prompt now."""

    input_tokens: int
    results: Sequence[SelectionResult]
    left_out: Sequence[str] = ()

    def __iter__(self) -> Iterator[SelectionResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def explain(self) -> str:
        lines = [f"prompt of {self.input_tokens} tokens", *(result.explain() for result in self.results)]
        if self.left_out:
            lines.append(f"left out, not serving prompts now: {', '.join(self.left_out)}")
        return "\n  ".join(lines)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to send a request, and why.

    `url` is the engine's address for routers, `headers` go with the request (the rank of a data-parallel engine).
    `source`: the worker to read `result.transferred_tokens` from, where a transfer pays.
    """

    worker_id: str
    url: str
    headers: Mapping[str, str]
    role: Role
    result: SelectionResult
    ranking: Ranking

    @property
    def cost(self) -> Cost:
        return self.result.cost

    @property
    def source(self) -> str | None:
        return self.result.source

    @property
    def predicted_cached_tokens(self) -> int:
        """What the engine should report as cached."""
        return self.result.usable_tokens + self.result.transferred_tokens

    def explain(self) -> str:
        """The choice, its cost term by term, and the runner-up."""
        lines = [f"{self.worker_id} at {self.url or '(no address)'}", self.result.explain()]
        if len(self.ranking.results) > 1:
            second = self.ranking.results[1]
            lines.append(f"next, {second.score_us - self.result.score_us} us more: {second.explain()}")
        return "\n  ".join(lines)
