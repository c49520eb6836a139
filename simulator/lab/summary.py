"""Computes the figures of outcomes, and summarizes them over several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from kvatlas_simulator.lab.replay import Outcome

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1; beyond the list, 2.26 errs on the safe side."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits of a good request: the time to the first token, and the mean time for each later one."""

    ttft_ms: float = 2_000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one replay. `hit_rate`: share of the prompt tokens found cached. `goodput_per_s`: requests per second that
    meet the objective; `good`: their share of all requests that arrived. `answer_mean_ms`: mean time from a request to its
    last token. `worker_hours`: workers times hours from the first arrival to the last answer. `imbalance`: prompt tokens
    computed by the fullest engine, as a multiple of the mean. `busy`: share of the time that engines computed."""

    hit_rate: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    ttft_longest_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    answer_mean_ms: float
    goodput_per_s: float
    good: float
    worker_hours: float
    imbalance: float
    prefilled_tokens: float
    busy: float
    preemptions: float
    lost_messages: float
    snapshots: float

    @classmethod
    def of(cls, outcome: Outcome, objective: Objective, *, skipped: int = 0) -> "Figures":
        """The figures of an outcome. `skipped`: the number of first requests whose figures don't count, because they
        find empty caches."""
        served = outcome.served[skipped - sum(number < skipped for number in outcome.refused) :]
        arrived = len(outcome.served) + len(outcome.refused) - skipped
        ttfts = sorted(one.ttft_us / 1e3 for one in served)
        tpots = sorted(one.tpot_us / 1e3 for one in served if one.output_tokens > 1) or [0.0]
        good = sum(one.ttft_us <= objective.ttft_ms * 1e3 and one.tpot_us <= objective.tpot_ms * 1e3 for one in served)
        engines, prefilled = len(outcome.prefilled_tokens), sum(outcome.prefilled_tokens)
        return cls(
            sum(one.cached_tokens for one in served) / sum(one.input_tokens for one in served),
            fmean(ttfts),
            percentile(ttfts, 0.5),
            percentile(ttfts, 0.9),
            percentile(ttfts, 0.99),
            ttfts[-1],
            fmean(tpots),
            percentile(tpots, 0.5),
            percentile(tpots, 0.9),
            percentile(tpots, 0.99),
            fmean(one.ttft_us + one.tpot_us * (one.output_tokens - 1) for one in served) / 1e3,
            good / outcome.span_us * 1e6,
            good / arrived,
            engines * outcome.span_us / 3.6e9,
            max(outcome.prefilled_tokens) * engines / prefilled if prefilled else 1.0,
            prefilled,
            sum(outcome.busy_us) / outcome.span_us / engines,
            outcome.preemptions,
            outcome.lost_messages,
            outcome.snapshots,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy's figures over several seeds: the mean of each, and half the width of its 95 % interval (0: one seed)."""

    policy: str
    seeds: int
    mean: Figures
    margin: Figures

    @classmethod
    def of(cls, policy: str, figures: Sequence[Figures]) -> "Summary":
        def each(reduce: Callable[[list[float]], float]) -> Figures:
            return Figures(**{name: reduce([getattr(one, name) for one in figures]) for name in asdict(figures[0])})

        return cls(policy, len(figures), each(fmean), each(margin))

    def to_jsonable(self) -> dict[str, Any]:
        return {"policy": self.policy, "seeds": self.seeds, "mean": asdict(self.mean), "margin_95": asdict(self.margin)}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value such that at least this share of the values don't exceed it."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def margin(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return _T_95[min(len(values) - 1, len(_T_95)) - 1] * stdev(values) / sqrt(len(values))
