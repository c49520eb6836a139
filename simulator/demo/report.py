"""The demo's result: a table, and the same figures as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from kvatlas.predictions.accuracy import MEANING, Deviation
from kvatlas_simulator.demo.load_generator import Outcome


@dataclass(frozen=True, slots=True)
class Phase:
    """One policy's run. `lag_*_ms` are upper bounds of histogram buckets; None if no message was applied."""

    name: str
    outcomes: Sequence[Outcome]
    seconds: float
    blocks_indexed: int
    lag_p50_ms: float | None
    lag_p99_ms: float | None

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that the engines found cached."""
        return sum(o.cached_tokens for o in self.outcomes) / max(1, sum(o.prompt_tokens for o in self.outcomes))

    @property
    def mean_ttft_ms(self) -> float:
        return fmean(o.ttft_ms for o in self.outcomes)

    @property
    def mean_answer_ms(self) -> float:
        return fmean(o.answer_ms for o in self.outcomes)

    @property
    def p99_ttft_ms(self) -> float:
        return self.ttfts[min(len(self.ttfts) - 1, int(0.99 * len(self.ttfts)))]

    @property
    def ttfts(self) -> list[float]:
        return sorted(o.ttft_ms for o in self.outcomes)

    @property
    def exact_rate(self) -> float:
        """The fraction of requests whose prediction equals the engine's figure."""
        return sum(o.deviation is Deviation.NONE for o in self.outcomes) / len(self.outcomes)

    @property
    def deviations(self) -> dict[Deviation, int]:
        """The numbers of requests that deviate from their prediction, by reason."""
        found = Counter(o.deviation for o in self.outcomes)
        return {why: found[why] for why in MEANING}

    def to_jsonable(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "requests": len(self.outcomes),
            "seconds": self.seconds,
            "hit_rate": self.hit_rate,
            "mean_ttft_ms": self.mean_ttft_ms,
            "p99_ttft_ms": self.p99_ttft_ms,
            "mean_answer_ms": self.mean_answer_ms,
            "predicted_cached_tokens": sum(o.predicted_tokens for o in self.outcomes),
            "cached_tokens": sum(o.cached_tokens for o in self.outcomes),
            "predicted_exactly": self.exact_rate,
            "deviations": {why.value: number for why, number in self.deviations.items()},
            "blocks_indexed": self.blocks_indexed,
            "event_lag_p50_ms_at_most": self.lag_p50_ms,
            "event_lag_p99_ms_at_most": self.lag_p99_ms,
            "refused": sum(o.refused for o in self.outcomes),
        }


def build_table(phases: Sequence[Phase]) -> Table:
    table = Table("", *(phase.name for phase in phases), title="the same conversations, from empty caches")
    rows = {
        "requests": [f"{len(p.outcomes):,} in {p.seconds:.0f} s" for p in phases],
        "prompt tokens found cached": [f"{p.hit_rate:.1%}" for p in phases],
        "time to first token, mean": [f"{p.mean_ttft_ms:,.0f} ms" for p in phases],
        "time to first token, p99": [f"{p.p99_ttft_ms:,.0f} ms" for p in phases],
        "complete answer, mean": [f"{p.mean_answer_ms:,.0f} ms" for p in phases],
        "cached tokens, as the router predicted": [f"{sum(o.predicted_tokens for o in p.outcomes):,}" for p in phases],
        "cached tokens, as the engines counted": [f"{sum(o.cached_tokens for o in p.outcomes):,}" for p in phases],
        "requests predicted exactly": [f"{p.exact_rate:.1%}" for p in phases],
        **{
            f"  {MEANING[why]}": [f"{p.deviations[why]:,}" for p in phases]
            for why in MEANING
            if any(p.deviations[why] for p in phases)
        },
        "blocks in the index at the end": [f"{p.blocks_indexed:,}" for p in phases],
        "event to index, p50 / p99": [f"{_at_most(p.lag_p50_ms)} / {_at_most(p.lag_p99_ms)}" for p in phases],
        "engines refused (503)": [f"{sum(o.refused for o in p.outcomes):,}" for p in phases],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _at_most(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"<= {milliseconds:,.0f} ms" if milliseconds >= 10 else f"<= {milliseconds:.2g} ms"
