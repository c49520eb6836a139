"""Metrics are read from plain integers when a reader asks."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from indexer.counters import IndexerCounters
from indexer.gauges import ReplicaGauges
from kvatlas.blocks.residency import IndexMetrics
from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.errors import InvalidValue
from kvatlas.predictions.accuracy import AnswerCounts
from kvatlas.telemetry import INSTRUMENTS, export_metrics
from kvatlas.telemetry import metric_export as observation
from kvatlas.telemetry.instruments import TOTALS, Instrument, Kind, Series
from publishers.counters import PublisherCounters
from publishers.ledger.counters import LedgerCounters
from router_client import RouterCounters
from router_client.learning.rate_metrics import RateMetrics
from router_client.proxy.counters import ProxyCounters
from router_client.tokens import TokenCounters

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SEEN = Instrument("kvatlas.test.seen", "{event}", "Events seen, by kind")
DEPTH = Instrument("kvatlas.test.depth", "{message}", "Messages waiting", Kind.GAUGE)


@dataclass(slots=True)
class Counters:
    good: int = 0
    bad: int = 0
    waiting: int = 0
    private: int = 99


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """A reader of its own and one test group of instruments."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    monkeypatch.setattr(observation, "_created", set())
    monkeypatch.setattr(observation, "_observed", {})
    monkeypatch.setitem(
        INSTRUMENTS,
        "test",
        {"good": Series(SEEN, {"kind": "good"}), "bad": Series(SEEN, {"kind": "bad"}), "waiting": Series(DEPTH)},
    )
    yield reader
    provider.shutdown()


def read(reader: InMemoryMetricReader) -> dict[tuple[str, tuple[tuple[str, object], ...]], int | float]:
    data = reader.get_metrics_data()
    return {
        (metric.name, tuple(sorted((point.attributes or {}).items()))): point.value  # type: ignore[union-attr]
        for resource in (data.resource_metrics if data else [])
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_a_reader_sees_the_integers_as_they_are_when_it_asks(reader: InMemoryMetricReader) -> None:
    counters = Counters()
    with export_metrics("test", counters, {"worker": "w1"}):
        counters.good, counters.bad, counters.waiting = 7, 2, 3
        assert read(reader) == {
            ("kvatlas.test.seen", (("kind", "good"), ("worker", "w1"))): 7,
            ("kvatlas.test.seen", (("kind", "bad"), ("worker", "w1"))): 2,
            ("kvatlas.test.depth", (("worker", "w1"),)): 3,
        }
        counters.good += 1
        assert read(reader)[("kvatlas.test.seen", (("kind", "good"), ("worker", "w1")))] == 8


def test_a_closed_observation_is_read_no_more(reader: InMemoryMetricReader) -> None:
    observation = export_metrics("test", Counters(good=1))
    assert read(reader)
    observation.close()
    observation.close()
    assert not read(reader)


def test_sources_with_equal_attributes_add_up_and_others_stay_apart(reader: InMemoryMetricReader) -> None:
    export_metrics("test", Counters(good=1), {"worker": "w1"})
    export_metrics("test", lambda: Counters(good=10), {"worker": "w1"})
    export_metrics("test", Counters(good=5), {"worker": "w2"})
    export_metrics("test", lambda: None)
    found = read(reader)
    assert found[("kvatlas.test.seen", (("kind", "good"), ("worker", "w1")))] == 11
    assert found[("kvatlas.test.seen", (("kind", "good"), ("worker", "w2")))] == 5


def test_learned_rates_are_series_of_each_worker_while_it_is_there(reader: InMemoryMetricReader) -> None:
    shown = RateMetrics()
    rates = {
        id: LearnedRates(9, EngineRates(prefill_us_per_token=us), 0.0, 0.1, 0.1) for id, us in (("a", 20), ("b", 30))
    }
    shown.export("pool", rates)
    prefill = {dict(key)["worker"]: us for (name, key), us in read(reader).items() if name.endswith(".prefill")}
    assert prefill == {"a": 20, "b": 30}
    shown.export("pool", {"b": rates["b"]})
    assert {dict(key)["worker"] for _, key in read(reader)} == {"b"}
    shown.close()
    assert not read(reader)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(InvalidValue, match="instrument group 'nosuch'"):
        export_metrics("nosuch", Counters())


def test_every_instrument_has_one_description_and_a_unit() -> None:
    by_name: dict[str, Instrument] = {}
    for group in INSTRUMENTS.values():
        for reading in group.values():
            assert by_name.setdefault(reading.instrument.name, reading.instrument) == reading.instrument
    for instrument in by_name.values():
        assert instrument.name.startswith("kvatlas.") and instrument.unit and instrument.description


@pytest.mark.parametrize(
    ("group", "counters"),
    [
        ("indexer", IndexerCounters()),
        ("replica", ReplicaGauges()),
        ("router", RouterCounters()),
        ("rates", LearnedRates(1, EngineRates(), 2.0, 0.1, 0.2)),
        ("proxy", ProxyCounters()),
        ("tokens", TokenCounters()),
        ("answers", AnswerCounts()),
        ("publisher", PublisherCounters()),
        ("ledger", LedgerCounters()),
        ("index", IndexMetrics(1, 2, 3, 4, 5, 6)),
    ],
)
def test_every_integer_that_is_counted_is_exported(
    reader: InMemoryMetricReader, group: str, counters: "DataclassInstance"
) -> None:
    counted = {one.name for one in fields(counters)}
    assert {name.partition(".")[0] for name in INSTRUMENTS[group]} == counted - TOTALS.get(group, set())
    with export_metrics(group, counters):
        assert len(read(reader)) == len(INSTRUMENTS[group])


def test_no_two_fields_of_a_group_are_the_same_series() -> None:
    for group in INSTRUMENTS.values():
        series = [(r.instrument.name, tuple(sorted(r.attributes.items()))) for r in group.values()]
        assert len(series) == len(set(series))
