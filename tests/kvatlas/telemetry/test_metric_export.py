"""Metrics are read from plain integers when a reader asks for them."""

from dataclasses import dataclass

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.errors import InvalidValue
from kvatlas.telemetry import INSTRUMENTS, export_metrics
from kvatlas.telemetry.instruments import Instrument, Kind, Series
from router_client.learning.rate_metrics import RateMetrics

SEEN = Instrument("kvatlas.test.seen", "{event}", "Events seen, by kind")
DEPTH = Instrument("kvatlas.test.depth", "{message}", "Messages waiting", Kind.GAUGE)


@dataclass(slots=True)
class Counters:
    good: int = 0
    bad: int = 0
    waiting: int = 0
    private: int = 99


@pytest.fixture(autouse=True)
def test_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of instruments for these tests."""
    monkeypatch.setitem(
        INSTRUMENTS,
        "test",
        {"good": Series(SEEN, {"kind": "good"}), "bad": Series(SEEN, {"kind": "bad"}), "waiting": Series(DEPTH)},
    )


def read(reader: InMemoryMetricReader) -> dict[tuple[str, tuple[tuple[str, object], ...]], int | float]:
    """Each series' value, by metric name and sorted attributes."""
    data = reader.get_metrics_data()
    return {
        (metric.name, tuple(sorted((point.attributes or {}).items()))): point.value  # type: ignore[union-attr]
        for resource in (data.resource_metrics if data else [])
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_a_reader_gets_the_integers_as_they_are_when_it_asks(metric_reader: InMemoryMetricReader) -> None:
    counters = Counters()
    with export_metrics("test", counters, {"worker": "w1"}):
        counters.good, counters.bad, counters.waiting = 7, 2, 3
        assert read(metric_reader) == {
            ("kvatlas.test.seen", (("kind", "good"), ("worker", "w1"))): 7,
            ("kvatlas.test.seen", (("kind", "bad"), ("worker", "w1"))): 2,
            ("kvatlas.test.depth", (("worker", "w1"),)): 3,
        }
        counters.good += 1
        assert read(metric_reader)[("kvatlas.test.seen", (("kind", "good"), ("worker", "w1")))] == 8


def test_a_closed_source_is_no_longer_exported(metric_reader: InMemoryMetricReader) -> None:
    source = export_metrics("test", Counters(good=1))
    assert read(metric_reader)
    source.close()
    source.close()
    assert not read(metric_reader)


def test_sources_with_equal_attributes_are_summed_and_others_stay_apart(metric_reader: InMemoryMetricReader) -> None:
    export_metrics("test", Counters(good=1), {"worker": "w1"})
    export_metrics("test", lambda: Counters(good=10), {"worker": "w1"})
    export_metrics("test", Counters(good=5), {"worker": "w2"})
    export_metrics("test", lambda: None)
    found = read(metric_reader)
    assert found[("kvatlas.test.seen", (("kind", "good"), ("worker", "w1")))] == 11
    assert found[("kvatlas.test.seen", (("kind", "good"), ("worker", "w2")))] == 5


def test_learned_rates_are_exported_per_worker_while_the_worker_exists(metric_reader: InMemoryMetricReader) -> None:
    rate_metrics = RateMetrics()
    rates = {
        id: LearnedRates(9, EngineRates(prefill_us_per_token=us), 0.0, 0.1, 0.1) for id, us in (("a", 20), ("b", 30))
    }
    rate_metrics.export("pool", rates)
    prefill = {dict(key)["worker"]: us for (name, key), us in read(metric_reader).items() if name.endswith(".prefill")}
    assert prefill == pytest.approx({"a": 20e-6, "b": 30e-6})
    rate_metrics.export("pool", {"b": rates["b"]})
    assert {dict(key)["worker"] for _, key in read(metric_reader)} == {"b"}
    rate_metrics.close()
    assert not read(metric_reader)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(InvalidValue, match="instrument group 'nosuch'"):
        export_metrics("nosuch", Counters())
