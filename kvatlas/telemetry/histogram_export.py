"""Hands distributions to OpenTelemetry's metric readers, which get everything else from the SDK's own instruments.

The SDK's observable counters and gauges read plain integers when an exporter asks, but the SDK has no observable histogram. We
therefore add distributions to the data that a reader receives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time_ns
from typing import Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvatlas.telemetry.distribution import SCALE, Distribution
from kvatlas.telemetry.instruments import Instrument
from kvatlas.telemetry.metric_export import read_distributions

_SCOPE = InstrumentationScope("kvatlas")
Attributes = Mapping[str, str]


def add_distributions(reader: MetricReader, resource: Resource, *, exponential: bool) -> None:
    """Make a reader receive all distributions as well, as exponential histograms or with explicit bounds."""
    receive: Callable[..., None] = reader._receive_metrics
    began_ns = time_ns()

    def receive_all(metrics_data: MetricsData | None, timeout_millis: float = 10_000, **more: Any) -> None:
        scopes = [] if metrics_data is None else [s for r in metrics_data.resource_metrics for s in r.scope_metrics]
        found = [
            _metric(instrument, series, began_ns, exponential=exponential)
            for instrument, series in read_distributions().items()
        ]
        if scopes or found:
            receive(MetricsData([ResourceMetrics(resource, _join(scopes, found), "")]), timeout_millis, **more)

    setattr(reader, "_receive_metrics", receive_all)  # noqa: B010 - mypy forbids assigning to a method


def _join(scopes: Sequence[ScopeMetrics], found: Sequence[Metric]) -> list[ScopeMetrics]:
    """Add these metrics to our scope. If there were two entries for a scope or resource, exporters would only keep the last
    one."""
    others = [scope for scope in scopes if scope.scope.name != _SCOPE.name]
    ours = [metric for scope in scopes if scope.scope.name == _SCOPE.name for metric in scope.metrics]
    return [*others, ScopeMetrics(_SCOPE, [*ours, *found], "")]


def _metric(
    instrument: Instrument, series: Iterable[tuple[Attributes, Distribution]], began_ns: int, *, exponential: bool
) -> Metric:
    now_ns = time_ns()
    data: Histogram | ExponentialHistogram
    cumulative = AggregationTemporality.CUMULATIVE
    if exponential:
        data = ExponentialHistogram([_exponential(*one, began_ns, now_ns) for one in series], cumulative)
    else:
        data = Histogram([_explicit(*one, began_ns, now_ns) for one in series], cumulative)
    return Metric(instrument.name, instrument.description, instrument.unit, data)


def _explicit(attributes: Attributes, found: Distribution, began_ns: int, now_ns: int) -> HistogramDataPoint:
    bounds, counts = found.doublings()
    least, most = _ends(found.counts, found)
    return HistogramDataPoint(
        dict(attributes),
        began_ns,
        now_ns,
        sum(counts),
        found.sum,
        counts,
        bounds,
        least,
        most,
        _exemplars(found),
    )


def _exponential(
    attributes: Attributes, found: Distribution, began_ns: int, now_ns: int
) -> ExponentialHistogramDataPoint:
    counts = found.counts
    least, most = _ends(counts, found)
    return ExponentialHistogramDataPoint(
        dict(attributes),
        began_ns,
        now_ns,
        found.count,
        found.sum,
        SCALE,
        0,
        Buckets(found.offset, list(counts)),
        Buckets(0, []),
        0,
        least,
        most,
        _exemplars(found),
    )


def _exemplars(found: Distribution) -> list[Exemplar]:
    return [Exemplar({}, one.value, one.time_ns, one.span_id, one.trace_id) for one in list(found.exemplars.values())]


def _ends(counts: Sequence[int], found: Distribution) -> tuple[float, float]:
    """The bounds of the lowest and of the highest bucket in use."""
    used = [number for number, count in enumerate(counts) if count] or [0]
    return 2.0 ** ((found.offset + used[0]) / (1 << SCALE)), 2.0 ** ((found.offset + used[-1] + 1) / (1 << SCALE))
