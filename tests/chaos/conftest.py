"""Hands the outcome of a scenario to the report at the end of a test run."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.chaos.report import PROPERTY, Outcome


@pytest.fixture
def report_outcome(record_property: Callable[[str, object], None]) -> Callable[[Outcome], None]:
    """Keeps an outcome with the test's result, which reaches the process that reports wherever the test runs."""
    return lambda outcome: record_property(PROPERTY, asdict(outcome))
