"""The table of instruments is complete, and has no series twice."""

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvatlas.blocks.residency import IndexWork, ModelBlocks, TierBlocks
from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.fleet.records import EngineState
from kvatlas.http.counters import HttpCounters
from kvatlas.index.local_copy.counters import ReplicaCounters
from kvatlas.predictions.accuracy import AnswerCounts
from kvatlas.runtime.process_gauges import ProcessGauges
from kvatlas.telemetry import INSTRUMENTS, export_metrics
from kvatlas.telemetry.instruments import NOT_EXPORTED, Instrument
from kvatlas.telemetry.metric_export import read_distributions
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.gauges import PartitionGauges, ReplicaGauges, StoreGauges
from kvatlas_publishers.counters import PublisherCounters, PublisherGauges
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_router.gateway.counters import GatewayCounters, GatewayGauges
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.queries.counters import QueryCounters
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tokens import TokenCounters
from router_client import RouterCounters
from tests.kvatlas.telemetry.test_metric_export import read

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


CONVENTIONS = ("gen_ai.", "db.client.", "http.server.", "messaging.")
"""OpenTelemetry's conventional names for all kinds of systems."""


def test_every_instrument_has_one_description_and_a_unit() -> None:
    by_name: dict[str, Instrument] = {}
    for group in INSTRUMENTS.values():
        for series in group.values():
            assert by_name.setdefault(series.instrument.name, series.instrument) == series.instrument
    for instrument in by_name.values():
        assert instrument.name.startswith(("kvatlas.", *CONVENTIONS)) and instrument.unit and instrument.description
        assert instrument.unit not in ("us", "ms", "KiBy"), "seconds and bytes"


@pytest.mark.parametrize(
    ("group", "counters"),
    [
        ("indexer", IndexerCounters()),
        ("replica", ReplicaGauges()),
        ("partition", PartitionGauges(1)),
        ("index", ModelBlocks()),
        ("store", StoreGauges(7, 8)),
        ("router", RouterCounters()),
        ("rates", LearnedRates(1, EngineRates(), 2.0, 0.1, 0.2)),
        ("proxy", ProxyCounters()),
        ("gateway_load", GatewayGauges(1, 2, 3)),
        ("http", HttpCounters()),
        ("tenancy", TenancyCounters()),
        ("process", ProcessGauges(3, 1024, 86_400.0)),
        ("gateway", GatewayCounters()),
        ("tokens", TokenCounters()),
        ("queries", QueryCounters()),
        ("index_replica", ReplicaCounters()),
        ("answers", AnswerCounts()),
        ("publisher", PublisherCounters()),
        ("engine", PublisherGauges(1, 0.5, 0.0, EngineState.UP, 1, 2, TierBlocks(), 0, 0)),
        ("ledger", LedgerCounters()),
        ("index_work", IndexWork(1, 2, 3, 4)),
    ],
)
def test_every_counter_is_exported(
    metric_reader: InMemoryMetricReader, group: str, counters: "DataclassInstance"
) -> None:
    counted = {one.name for one in fields(counters)}
    exported = {name.partition(".")[0] for name in INSTRUMENTS[group]}
    computed = {name for name in exported - counted if isinstance(getattr(type(counters), name), property)}
    assert exported - computed == counted - NOT_EXPORTED.get(group, set())
    with export_metrics(group, counters):
        series = sum(len(found) for found in read_distributions().values())
        assert len(read(metric_reader)) + series == len(INSTRUMENTS[group])


def test_no_two_fields_of_a_group_are_the_same_series() -> None:
    for group in INSTRUMENTS.values():
        series = [(one.instrument.name, tuple(sorted(one.attributes.items()))) for one in group.values()]
        assert len(series) == len(set(series))
