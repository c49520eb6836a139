"""Distributions of plain integers: where values are counted, and that every exporter gets the same counts."""

import math
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.telemetry import INSTRUMENTS, export_metrics, metric_export
from kvatlas.telemetry.distribution import SCALE, SECONDS, TOKENS, Distribution, counters_to_jsonable
from kvatlas.telemetry.histogram_export import add_distributions
from kvatlas.telemetry.instruments import Instrument, Kind, Series
from kvatlas.telemetry.prometheus_exemplars import with_exemplars

TIME = Instrument("kvatlas.test.duration", "s", "How long it took", Kind.HISTOGRAM)
SEEN = Instrument("kvatlas.test.seen", "{event}", "Events seen")


@dataclass(slots=True)
class Counters:
    seen: int = 0
    fast: Distribution = field(default_factory=Distribution)
    slow: Distribution = field(default_factory=Distribution)


@given(st.lists(st.floats(0, 2_000)))
def test_each_value_is_counted_once_in_the_bucket_that_holds_it(values: list[float]) -> None:
    found = Distribution()
    for value in values:
        found.add(value)
    assert found.count == len(values) and math.isclose(found.sum, sum(values))
    step = 2 ** (1 / (1 << SCALE))
    for number, count in enumerate(found.counts):
        low = 2.0**SECONDS.lowest * step**number
        above, below = low if number else -1.0, low * step if number < len(found.counts) - 1 else math.inf
        assert count == sum(above * (1 + 1e-12) < value <= below * (1 + 1e-12) for value in values)
    bounds, counts = found.doublings()
    assert sum(counts) == len(values) and len(counts) == len(bounds) + 1 and bounds[0] == 2.0 ** (SECONDS.lowest + 1)


def test_what_is_below_0_or_no_number_is_counted_and_leaves_the_sum_alone() -> None:
    found = Distribution()
    for value in (-1.0, math.nan, 0.5):
        found.add(value)
    assert (found.counts[0], found.count, found.sum) == (2, 3, 0.5)


def test_a_quantile_is_at_most_a_bucket_above_the_true_one() -> None:
    found, values = Distribution(), [1.003**number / 1_000 for number in range(2_000)]
    for value in values:
        found.add(value)
    for percent in (50, 90, 99):
        true = quantiles(values, n=100)[percent - 1]
        bound = found.quantile(percent / 100)
        assert bound is not None and true * 0.99 <= bound <= true * 1.43
    assert Distribution().quantile(0.5) is None
    found.add(1e9)
    assert found.quantile(1.0) == math.inf
    assert counters_to_jsonable(Counters(3, found))["fast"]["p99"] == found.quantile(0.99)


def test_tokens_have_buckets_of_their_own_and_several_values_can_be_added_at_once() -> None:
    found = Distribution(TOKENS)
    found.add(1_000, times=3)
    assert (found.count, found.sum) == (3, 3_000)
    assert found.quantile(0.5) == 1_024


def test_prometheus_and_otlp_get_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        INSTRUMENTS,
        "test",
        {"seen": Series(SEEN), "fast": Series(TIME, {"kind": "fast"}), "slow": Series(TIME, {"kind": "slow"})},
    )
    registry, resource = CollectorRegistry(), Resource.create({"service.name": "kvatlas-test"})
    pulled, pushed = PrometheusMetricReader(registry=registry), InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[pulled, pushed], resource=resource)
    monkeypatch.setattr("opentelemetry.metrics.get_meter", provider.get_meter)
    monkeypatch.setattr(metric_export, "_created", set())
    monkeypatch.setattr(metric_export, "_sources", {})
    add_distributions(pulled, resource, exponential=False)
    add_distributions(pushed, resource, exponential=True)
    first, second = Counters(7), Counters(5)
    for number in range(1, 200):
        first.fast.add(number / 1e4)
        first.slow.add(number)
        second.fast.add(number / 1e5)
    try:
        with export_metrics("test", first, {"worker": "w1"}), export_metrics("test", second, {"worker": "w1"}):
            page = generate_latest(registry).decode()
            data = pushed.get_metrics_data()
    finally:
        provider.shutdown()
    assert data is not None
    samples = {
        (sample.name, sample.labels.get("kind"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["kvatlas_test_seen_total", None, None] == 12
    encoded = encode_metrics(data)  # as sent over the wire
    points = {
        point.attributes[0].value.string_value: point
        for resource_metrics in encoded.resource_metrics
        for scope in resource_metrics.scope_metrics
        for metric in scope.metrics
        if metric.name == TIME.name and metric.unit == "s"
        for point in metric.exponential_histogram.data_points
    }
    for kind, expected in (("fast", first.fast.plus(second.fast)), ("slow", first.slow)):
        point = points[kind]
        assert (point.count, point.sum) == (expected.count, expected.sum)
        assert samples["kvatlas_test_duration_seconds_count", kind, None] == expected.count
        assert samples["kvatlas_test_duration_seconds_sum", kind, None] == expected.sum
        seen = 0
        for number, count in enumerate(point.positive.bucket_counts):
            seen += count
            bound = 2.0 ** ((point.positive.offset + number + 1) / 2**point.scale)
            if (key := ("kvatlas_test_duration_seconds_bucket", kind, f"{bound}")) in samples:
                assert samples[key] == seen
        assert samples["kvatlas_test_duration_seconds_bucket", kind, "+Inf"] == seen == expected.count


def test_the_newest_traced_value_of_a_bucket_is_its_exemplar_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTRUMENTS, "test", {"seen": Series(SEEN), "fast": Series(TIME, {"kind": "fast"})})
    monkeypatch.setattr(metric_export, "_created", set())
    monkeypatch.setattr(metric_export, "_sources", {})
    registry, resource = CollectorRegistry(), Resource.create({})
    pulled, pushed = PrometheusMetricReader(registry=registry), InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[pulled, pushed], resource=resource)
    monkeypatch.setattr("opentelemetry.metrics.get_meter", provider.get_meter)
    for reader in (pulled, pushed):
        add_distributions(reader, resource, exponential=reader is pushed)
    collector: Any = pulled._collector
    collector.collect = with_exemplars(collector.collect)
    found = Distribution()
    for number, value in enumerate((0.1, 0.11, 0.02), 1):
        found.add(value, span=SpanContext(number, number, is_remote=False, trace_flags=TraceFlags(1)))
    found.add(0.12)
    try:
        with export_metrics("test", Counters(fast=found), {"worker": "w1"}):
            page = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
            data = pushed.get_metrics_data()
    finally:
        provider.shutdown()
    shown = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in read_openmetrics(page)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert shown == {"0.125": (f"{2:032x}", 0.11), "0.03125": (f"{3:032x}", 0.02)}
    assert data is not None
    (metric,) = [one for one in data.resource_metrics[0].scope_metrics[0].metrics if one.name == TIME.name]
    (point,) = metric.data.data_points
    assert {(one.trace_id, one.value) for one in point.exemplars} == {(2, 0.11), (3, 0.02)}
