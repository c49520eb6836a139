"""The demo's table, as a reader sees it."""

import pytest
from rich.console import Console

from kvatlas.predictions.accuracy import Deviation
from kvatlas_simulator.demo.load_generator import Outcome
from kvatlas_simulator.demo.report import Phase, build_table


@pytest.mark.parametrize("lag_ms", [0.5, 9.99, 120.0, 15_000.0])
def test_figures_are_printed_without_powers_of_ten(lag_ms: float) -> None:
    outcomes = [Outcome("w1", 30_123.0, 45_678.0, 2_000_000, 1_999_999, 1_999_999, Deviation.NONE, 0)] * 12_345
    phase = Phase("kvatlas", outcomes, 100.0, 1_234_567, lag_ms, lag_ms)
    console = Console(width=100)
    with console.capture() as printed:
        console.print(build_table([phase]))
    assert all(figure in printed.get() for figure in ("30,123 ms", "45,678 ms"))
    assert "e+" not in printed.get()
