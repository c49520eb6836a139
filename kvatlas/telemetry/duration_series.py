"""Durations by attributes whose values are known only at run time, such as a status: there is one distribution for each
combination."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvatlas.telemetry.distribution import Distribution
from kvatlas.telemetry.metric_export import MetricSource, export_metrics

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MOST_SERIES = 100
OTHER = "_OTHER"
"""OpenTelemetry's word for a value that is not listed separately."""


@dataclass(slots=True)
class Duration:
    """One series of durations."""

    duration: Distribution = field(default_factory=Distribution)


class Durations:
    """The series of one group of instruments, whose only field is `duration`. Each series is exported from its first value on.
    After MOST_SERIES, new combinations are counted as OTHER."""

    def __init__(self, group: str, names: Sequence[str], common: Mapping[str, str]) -> None:
        """`names`: the attributes whose values are passed to `add`. `common`: the attributes of all series."""
        self._group = group
        self._names = names
        self._common = common
        self._series: dict[tuple[str, ...], tuple[Duration, MetricSource]] = {}

    def add(self, values: tuple[str, ...], seconds: float, span: "SpanContext | None" = None) -> None:
        """Count one duration; an empty value means that the attribute is absent."""
        found = self._series.get(values)
        if found is None:
            if len(self._series) >= MOST_SERIES:
                values = (OTHER,) * len(self._names)
            found = self._series.get(values) or self._begin(values)
        found[0].duration.add(seconds, span=span)

    def _begin(self, values: tuple[str, ...]) -> tuple[Duration, MetricSource]:
        own = {name: value for name, value in zip(self._names, values, strict=True) if value}
        series = Duration()
        self._series[values] = series, export_metrics(self._group, series, {**self._common, **own})
        return self._series[values]
