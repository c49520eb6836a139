"""The grid of the lab: verdicts by seed, and one case from load to table."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab import grid
from kvatlas_simulator.lab.summary import Figures

TTFT = grid.AIMS[0]


def figures(ttft_ms: float) -> Figures:
    names = Figures.__annotations__
    return Figures(**{name: ttft_ms if name == "ttft_mean_ms" else 1.0 for name in names})


def results(ours: list[float], theirs: list[float]) -> grid.Results:
    return {
        ("chats", 1.0, "kvatlas"): [figures(one) for one in ours],
        ("chats", 1.0, "lmetric"): [figures(one) for one in theirs],
        ("chats", 1.0, "session"): [figures(1_000.0)],
        ("chats", 1.0, "oracle"): [figures(1.0)],
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ([100.0, 200.0, 300.0], [110.0, 212.0, 311.0], "win"),  # faster with every seed, although the seeds differ more
        ([110.0, 212.0, 311.0], [100.0, 200.0, 300.0], "loss"),
        ([100.0, 200.0, 300.0], [150.0, 150.0, 310.0], "tie"),
    ],
)
def test_a_verdict_is_certain_if_the_difference_by_seed_is_beyond_its_interval(
    ours: list[float], theirs: list[float], word: str
) -> None:
    found = results(ours, theirs)
    assert grid.best_rival(found, "chats", 1.0, TTFT) == "lmetric"  # the oracle does not count as a rival
    assert grid.compare_with(found, "chats", 1.0, "lmetric", TTFT).word == word


def test_a_grid_is_replayed_once_and_goes_on_from_its_file(tmp_path: Path) -> None:
    case = replace(grid.CASES[0], fleet=replace(grid.FLEET, workers=2))
    kept = tmp_path / "figures.jsonl"
    first, second = (grid.run_grid([case], ("kvatlas", "lmetric"), (0.9,), 2, 24, "python", 1, kept) for _ in range(2))
    assert first == second
    assert len(kept.read_text().splitlines()) == 4
    page = grid.to_markdown(first, "make lab", 2, 24)
    assert "| chats | 0.9 |" in page and "| lmetric |" in page
