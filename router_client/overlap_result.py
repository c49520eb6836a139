"""The overlap of a prompt with each worker of its pool."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineKind, FleetRecord
from router_client.learning.bound_shares import BoundShares
from router_client.pricing.overlap import NOTHING_HELD, HeldPrefix
from router_client.pricing.reuse_limit import describe_bound, why_usable_ends
from router_client.prompt import Prompt


@dataclass(frozen=True, slots=True)
class WorkerOverlap:
    """The part of a prompt that one worker, or one shared store (`kind` "store"), holds. Blocks are counted in the worker's
    own block size (`block_size`; 0: it has not announced any block yet).

    `resident_tokens` is a lower bound if the worker announces only every g-th block; `usable_tokens` of them will really be
    reused by its engine. `tokens_by_tier` counts each token once, in its nearest tier. `routable`: the worker may get requests
    now. `predicted_tokens`: usable tokens of a worker without events (`events` False), which is predicted to hold them because
    they were computed there; they never count as resident. `marks`: the worker's marks show where the prompt can resume.
    `upper_bound`: why `usable_tokens` is only an upper bound. `why`: why the usable tokens end where they do; empty if all
    resident tokens are usable.
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
    events: bool = True
    predicted_tokens: int = 0
    marks: bool = False
    upper_bound: str = ""
    why: str = ""
    kind: str = ""

    def explain(self) -> str:
        """The overlap in one line."""
        tiers = ", ".join(f"{tokens} in {tier.label}" for tier, tokens in self.tokens_by_tier.items())
        store = "store " if self.kind == EngineKind.STORE else ""
        text = f"{store}{self.worker_id}: {self.resident_blocks} of {self.required_blocks} blocks"
        if not tiers and self.why:
            text += f" ({self.why})"
        if tiers:
            at_most = "at most " if self.upper_bound else ""
            text += f", {self.resident_tokens} tokens resident ({tiers}), {at_most}{self.usable_tokens} usable"
            notes = [note for note in (self.why, self.upper_bound and f"upper bound: {self.upper_bound}") if note]
            text += f" ({'; '.join(notes)})" if notes else ""
        if not self.events:
            text += f", {self.predicted_tokens} tokens predicted (its engine publishes no events)"
        return text if self.routable or store else text + " (gets no requests now)"


@dataclass(frozen=True, slots=True)
class PromptOverlap:
    """Every worker of a pool with the part of a prompt that it holds; workers with the most usable tokens come first.
    `remarks`: see `Ranking`."""

    input_tokens: int
    workers: Sequence[WorkerOverlap]
    remarks: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[WorkerOverlap]:
        return iter(self.workers)

    def of(self, worker_id: str) -> WorkerOverlap | None:
        """One worker's overlap; None for a worker of another pool."""
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)

    def explain(self) -> str:
        """One line per worker."""
        workers = (worker.explain() for worker in self.workers)
        lines = [f"prompt of {self.input_tokens} tokens", *workers, *self.remarks]
        return "\n  ".join(lines)


def list_overlaps(
    prompt: Prompt,
    records: Mapping[str, FleetRecord],
    held: Mapping[str, HeldPrefix],
    predicted: Mapping[str, int],
    bounds: BoundShares,
) -> tuple[WorkerOverlap, ...]:
    """The overlap of each worker of a pool; workers with the most usable tokens come first. `predicted`: the predicted
    tokens of workers without events."""
    each = (_describe_overlap(prompt, record, held, predicted, bounds) for record in records.values())
    return tuple(sorted(each, key=_order))


def _describe_overlap(
    prompt: Prompt,
    record: FleetRecord,
    held: Mapping[str, HeldPrefix],
    predicted: Mapping[str, int],
    bounds: BoundShares,
) -> WorkerOverlap:
    endpoint = record.endpoint
    mine = held.get(endpoint.id, NOTHING_HELD)
    size = endpoint.block_size or 0
    rule = bounds.of(endpoint)
    usable = mine.usable_tokens(rule, prompt, endpoint.kind, size or 1)
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
        events=endpoint.events,
        predicted_tokens=0 if endpoint.events else predicted.get(endpoint.id, 0),
        marks=endpoint.marks,
        upper_bound=describe_bound(endpoint, rule),
        why=why_usable_ends(mine, usable, rule, prompt, endpoint),
        kind=endpoint.kind.value,
    )


def _order(worker: WorkerOverlap) -> tuple[int, int, str]:
    return -worker.usable_tokens - worker.predicted_tokens, -worker.resident_tokens, worker.worker_id
