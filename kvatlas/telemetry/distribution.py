"""A histogram of plain integers for the hot path: adding a value takes 0.5 us, compared with 10 us in OpenTelemetry's own."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from time import time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from opentelemetry.trace import SpanContext

SCALE = 1
"""Scale of OpenTelemetry's exponential histograms: 2 ** SCALE buckets per doubling. `Distribution.add` relies on two."""
_STEPS = 1 << SCALE
_MIDDLE = 2**-0.5


@dataclass(frozen=True, slots=True)
class Extent:
    """The range with separate buckets: from 2 ** `lowest` to 2 ** `highest`; other values are counted in the nearest bucket."""

    lowest: int
    highest: int


SECONDS = Extent(-17, 9)
"""8 us to 512 s."""
TOKENS = Extent(0, 18)
"""1 to 262,144."""


class Exemplar(NamedTuple):
    """One counted value, and the span in which it was measured. `time_ns`: nanoseconds since 1970."""

    value: float
    trace_id: int
    span_id: int
    time_ns: int


@cache
def _upper_bounds(extent: Extent) -> Sequence[float]:
    """The upper bounds of all buckets except the last one; each bound belongs to its bucket."""
    powers = range(extent.lowest + 1, extent.highest + 1)
    return [bound for power in powers for bound in (_MIDDLE * 2.0**power, 2.0**power)][:-1]


@dataclass(slots=True)
class Distribution:
    """Values since the object was created, counted in two buckets for each doubling. No value is below 0.

    `exemplars`: for each doubling, the newest value with a span, by the index of the doubling.
    """

    extent: Extent = SECONDS
    counts: list[int] = field(default_factory=list)
    """By bucket, lowest first."""
    sum: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    _bounds: Sequence[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._bounds = _upper_bounds(self.extent)
        self.counts = self.counts or [0] * (len(self._bounds) + 1)

    def add(self, value: float, times: int = 1, *, span: "SpanContext | None" = None) -> None:
        """Count a value, together with the sampled span in which it was measured, if there is one."""
        place = bisect_left(self._bounds, value)
        self.counts[place] += times
        if value > 0:
            self.sum += value * times
        if span is not None:
            self.exemplars[place // _STEPS] = Exemplar(value, span.trace_id, span.span_id, time_ns())

    @property
    def offset(self) -> int:
        """The index of the first bucket in an exponential histogram of this scale."""
        return self.extent.lowest * _STEPS

    @property
    def count(self) -> int:
        return sum(self.counts)

    def doublings(self) -> tuple[list[float], list[int]]:
        """The upper bounds of buckets that each cover a doubling, and their counts. The last bucket has no bound."""
        bounds = [2.0**power for power in range(self.extent.lowest + 1, self.extent.highest)]
        counts = [sum(self.counts[at : at + _STEPS]) for at in range(0, len(self.counts), _STEPS)]
        return bounds, counts

    def quantile(self, q: float) -> float | None:
        """The upper bound of the bucket that contains the quantile: infinity for the last bucket; None before the first
        value."""
        total, seen = self.count, 0
        if not total:
            return None
        for number, count in enumerate(self.counts[:-1], 1):
            seen += count
            if seen >= q * total:
                return float(2.0 ** ((self.offset + number) / _STEPS))
        return inf

    def plus(self, other: "Distribution") -> "Distribution":
        """The sum of both; their extents must be equal."""
        counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        return Distribution(self.extent, counts, self.sum + other.sum, {**self.exemplars, **other.exemplars})

    def to_jsonable(self) -> dict[str, Any]:
        """A human-readable summary. Quantiles are upper bounds, and None if they are unknown or infinite."""
        found = {f"p{round(q * 100)}": self.quantile(q) for q in (0.5, 0.99)}
        finite = {name: at if at is not None and isfinite(at) else None for name, at in found.items()}
        return {"count": self.count, "sum": self.sum, **finite}


def counters_to_jsonable(counters: "DataclassInstance") -> dict[str, Any]:
    """The counters, with plain numbers unchanged, distributions as summaries, and nested counters as objects."""
    return {one.name: _to_jsonable(getattr(counters, one.name)) for one in fields(counters)}


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, Distribution):
        return value.to_jsonable()
    return counters_to_jsonable(value) if is_dataclass(value) and not isinstance(value, type) else value
