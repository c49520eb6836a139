"""Durations by attributes that become known only when something happens."""

import pytest

from kvatlas.telemetry import metric_export
from kvatlas.telemetry.duration_series import MOST_SERIES, OTHER, Durations
from kvatlas.telemetry.metric_export import read_distributions


@pytest.fixture(autouse=True)
def no_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_export, "_sources", {})


def exported() -> dict[tuple[tuple[str, str], ...], int]:
    (series,) = read_distributions().values()
    return {tuple(sorted(attributes.items())): found.count for attributes, found in series}


def test_each_set_of_attributes_is_a_series_and_an_empty_value_is_none() -> None:
    found = Durations("store_call", ("db.operation.name", "error.type"), {"db.system.name": "redis"})
    for values in (("FCALL", ""), ("FCALL", ""), ("FCALL", "Unreachable")):
        found.add(values, 0.1)
    call, system = ("db.operation.name", "FCALL"), ("db.system.name", "redis")
    assert exported() == {(call, system): 2, (call, system, ("error.type", "Unreachable")): 1}


def test_series_are_bounded() -> None:
    found = Durations("store_call", ("db.operation.name",), {})
    for number in range(MOST_SERIES + 7):
        found.add((str(number),), 0.1)
    assert len(exported()) == MOST_SERIES + 1 and exported()[(("db.operation.name", OTHER),)] == 7
