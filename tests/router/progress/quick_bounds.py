"""Bounds short enough for tests."""

import pytest

from kvatlas_router.progress.expected_times import Bounds


def shorten_bounds(monkeypatch: pytest.MonkeyPatch, *, least_s: float = 0.5, unknown_s: float = 0.5) -> None:
    """`least_s`: shortest time until an engine with known times may be suspected. `unknown_s`: time until one with unknown
    times is stalled."""
    times, engine = "kvatlas_router.progress.expected_times", "kvatlas_router.progress.engine_progress"
    monkeypatch.setattr(f"{times}.LEAST_SUSPECT_S", least_s)
    monkeypatch.setattr(f"{times}.UNKNOWN_S", unknown_s)
    monkeypatch.setattr(f"{engine}.BEGUN", Bounds(least_s, 2 * least_s))
    monkeypatch.setattr(f"{engine}.PROBE_EVERY_S", 0.2)
    monkeypatch.setattr(f"{engine}.PROBE_S", 1.0)
    monkeypatch.setattr(f"{engine}.CUT_S", 1.0)
