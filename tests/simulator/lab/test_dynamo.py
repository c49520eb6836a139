"""Dynamo's own selection, based on the engines' events; `make bench-peer` installs it."""

import sys
from pathlib import Path

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.lab.generated_requests import generate
from kvatlas_simulator.lab.replay import FleetSettings, replay
from kvatlas_simulator.lab.study import Point, Study, compare
from kvatlas_simulator.lab.summary import Figures, Objective

PYTHON = Path(".bench-peer/bin/python")


def test_a_python_without_dynamo_is_one_clear_line_before_anything_is_replayed() -> None:
    study = Study(generate("chat", 0, 20), ("random", "dynamo"), [Point(2, 60_000)], dynamo_python=sys.executable)
    with pytest.raises(
        InvalidValue, match="has no ai-dynamo-runtime; install it .* name that Python with --dynamo-python"
    ):
        compare(study, jobs=1)


def test_a_dynamo_python_that_is_none_is_one_clear_line() -> None:
    study = Study(generate("chat", 0, 20), ("dynamo",), [Point(2, 60_000)], dynamo_python="/nowhere/python")
    with pytest.raises(InvalidValue, match="--dynamo-python is '/nowhere/python': No such file"):
        compare(study, jobs=1)


@pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is installed by `make bench-peer` (300 MB)")
def test_dynamo_finds_what_events_tell_it() -> None:
    workload = generate("tenants", 0, 120)
    settings = {loss: FleetSettings(4, 60_000, event_loss=loss, dynamo_python=str(PYTHON)) for loss in (0.0, 0.999)}
    with_events, without = (
        Figures.of(replay(workload, "dynamo", fleet, 1, speed=4.0), Objective()) for fleet in settings.values()
    )
    assert with_events.hit_rate > 1.1 * without.hit_rate
    assert without.lost_messages > 0
