"""Compares the answers of engines with the predictions of routers: deviations, their counts, and what to do about them."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from kvatlas.dataclass import dataclass
from kvatlas.fleet.records import WireRecord, WorkerId
from kvatlas.predictions.condition import RouterCondition
from kvatlas.validation import Count, Name

WRONG_SHARE = 0.05
"""The share of deviating answers that becomes a finding; at moderate load less than 0.01 deviate."""
ENOUGH_ANSWERS = 50
MAX_FOREIGN_TENANTS = 8
MAX_STALLED = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a router expects of one answer.

    `prompt_tokens=None`: unknown. `unconfirmed_tokens`: those of the `cached_tokens` that no event has confirmed, because they
    were still being computed or the worker sends no events. `by_index=False`: the index was not used, or did not answer in
    time. `bounded`: the prediction is an upper bound of what the engine reuses, or that bound times the share seen in earlier
    answers.
    """

    prompt_tokens: int | None
    cached_tokens: int = 0
    unconfirmed_tokens: int = 0
    by_index: bool = True
    bounded: bool = False


class Deviation(StrEnum):
    """Why an engine found a different number of cached prompt tokens than was predicted; the first reason that applies.

    `OTHER_TOKENS`: its prompt tokens differ from the router's count. `WITHOUT_INDEX`: the choice was made without the index.
    `BOUNDED`: only an upper bound was known, as for SGLang's hybrid models; nothing is wrong. `NEWER`: it found more, which was
    stored or published after the choice. `UNCONFIRMED`: it found what events had confirmed, but not all of the prefix that was
    in flight or only predicted. `EVICTED`: it found less than events had confirmed.
    """

    NONE = "none"
    OTHER_TOKENS = "other_tokens"
    WITHOUT_INDEX = "without_index"
    BOUNDED = "bounded"
    NEWER = "newer"
    UNCONFIRMED = "unconfirmed"
    EVICTED = "evicted"


MEANING: Mapping[Deviation, str] = {
    Deviation.OTHER_TOKENS: "the engine counts other tokens",
    Deviation.WITHOUT_INDEX: "chosen without the index",
    Deviation.BOUNDED: "only an upper bound was known",
    Deviation.NEWER: "stored or published after the choice",
    Deviation.UNCONFIRMED: "prefix in flight, not there yet",
    Deviation.EVICTED: "evicted since the choice",
}


def deviation(predicted: Prediction, prompt_tokens: int, cached_tokens: int) -> Deviation:
    """How an answer with these token counts deviates from its prediction."""
    if cached_tokens == predicted.cached_tokens:
        return Deviation.NONE
    if predicted.prompt_tokens not in (None, prompt_tokens):
        return Deviation.OTHER_TOKENS
    if not predicted.by_index:
        return Deviation.WITHOUT_INDEX
    if predicted.bounded:
        return Deviation.BOUNDED
    if cached_tokens > predicted.cached_tokens:
        return Deviation.NEWER
    if cached_tokens >= predicted.cached_tokens - predicted.unconfirmed_tokens:
        return Deviation.UNCONFIRMED
    return Deviation.EVICTED


@dataclass(slots=True)
class AnswerCounts:
    """Counts since the router started.

    `prompts_*`: the engine's prompt tokens compared with ours. `cached_*`: its cached tokens compared with the prediction, by
    `Deviation`; `cached_untold`: the number of answers that don't report them. `predicted_tokens` and `cached_tokens`: sums
    over the answers that do report them.
    """

    prompts_equal: int = 0
    prompts_differ: int = 0
    cached_equal: int = 0
    cached_other_tokens: int = 0
    cached_without_index: int = 0
    cached_bounded: int = 0
    cached_newer: int = 0
    cached_unconfirmed: int = 0
    cached_evicted: int = 0
    cached_untold: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0

    @property
    def by_deviation(self) -> dict[Deviation, int]:
        """The number of answers that deviate, by reason."""
        return {
            Deviation.OTHER_TOKENS: self.cached_other_tokens,
            Deviation.WITHOUT_INDEX: self.cached_without_index,
            Deviation.BOUNDED: self.cached_bounded,
            Deviation.NEWER: self.cached_newer,
            Deviation.UNCONFIRMED: self.cached_unconfirmed,
            Deviation.EVICTED: self.cached_evicted,
        }

    def add(self, predicted: Prediction, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Count one answer; `cached_tokens=None`: the engine does not report them."""
        if predicted.prompt_tokens is None:  # nothing was predicted
            return
        if predicted.prompt_tokens == prompt_tokens:
            self.prompts_equal += 1
        else:
            self.prompts_differ += 1
        if cached_tokens is None:
            self.cached_untold += 1
            return
        self.predicted_tokens += predicted.cached_tokens
        self.cached_tokens += cached_tokens
        match deviation(predicted, prompt_tokens, cached_tokens):
            case Deviation.NONE:
                self.cached_equal += 1
            case Deviation.OTHER_TOKENS:
                self.cached_other_tokens += 1
            case Deviation.WITHOUT_INDEX:
                self.cached_without_index += 1
            case Deviation.BOUNDED:
                self.cached_bounded += 1
            case Deviation.NEWER:
                self.cached_newer += 1
            case Deviation.UNCONFIRMED:
                self.cached_unconfirmed += 1
            case Deviation.EVICTED:
                self.cached_evicted += 1


class ForeignTenant(WireRecord):
    """Requests of a tenant that recently went to workers whose blocks belong to a different tenant. The last one went to
    `worker_id`."""

    tenant_id: Name
    published_tenant_id: Name
    worker_id: WorkerId
    requests: Count


class AnswerReport(WireRecord):
    """One router's counts of the answers in one pool, and a description of the last prompt whose tokens differed.

    `prompt_tokens`: of the answers that report cached tokens. `stalled`: workers that make no progress although they have work.
    `recent`: the counts of the last minute; only these are judged. `condition`: the condition of the whole router. Earlier
    routers report none of these, nor `foreign_tenants`."""

    counts: AnswerCounts = Field(default_factory=AnswerCounts)
    example: str = ""
    prompt_tokens: Count = 0
    foreign_tenants: tuple[ForeignTenant, ...] = Field(default=(), max_length=MAX_FOREIGN_TENANTS)
    stalled: tuple[WorkerId, ...] = Field(default=(), max_length=MAX_STALLED)
    recent: AnswerCounts | None = None
    condition: RouterCondition | None = None

    def findings(self) -> list[tuple[str, str]]:
        """(finding, advice) for each problem of the last minute, one line each."""
        counts, found = self.recent or self.counts, []
        if counts.prompts_differ:
            total = counts.prompts_equal + counts.prompts_differ
            line = f"the tokenizer is not the engine's: {counts.prompts_differ} of {total} prompts differ"
            line += f", the last had {self.example}"
            found.append((line, "check its files and the chat template, or ask the engine (--tokenizer engine)"))
        deviating = counts.by_deviation
        reported = counts.cached_equal + sum(deviating.values())
        if counts.cached_untold and not reported:
            advice = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
            found.append(("engines don't report cached tokens", advice))
        deviating.pop(Deviation.OTHER_TOKENS)  # reported above
        deviating.pop(Deviation.BOUNDED)
        if reported >= ENOUGH_ANSWERS and sum(deviating.values()) >= WRONG_SHARE * reported:
            parts = ", ".join(f"{MEANING[why]}: {number}" for why, number in deviating.items() if number)
            line = f"{sum(deviating.values())} of {reported} answers had other cached tokens than predicted ({parts})"
            found.append((line, _ADVICE[max(deviating, key=lambda why: deviating[why])]))
        return found


_ADVICE = {
    Deviation.WITHOUT_INDEX: "the store answers too late: look at its latency, or raise --decision-deadline-ms",
    Deviation.NEWER: "events come late, or the index was emptied and fills again: look at the indexers' lag and log",
    Deviation.UNCONFIRMED: "prefills take longer than predicted: the engines are overloaded, or priced wrong",
    Deviation.EVICTED: "engines evict what is about to be used: their caches are too small for this load",
}
