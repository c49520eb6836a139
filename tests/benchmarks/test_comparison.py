"""Figures of two subjects become one row."""

from benchmarks.peer.comparison import Comparison, Subject


def test_the_ratio_is_the_median_of_the_turns_ratios() -> None:
    row = Comparison("a", "ms", {Subject.OURS: [1.0, 8.0, 3.0], Subject.THEIRS: [2.0, 2.0, 2.0]})
    assert row.ratio == 1.5


def test_a_figure_that_only_one_has_has_no_ratio() -> None:
    assert Comparison("a", "ms", {Subject.OURS: [1.0]}).ratio is None
    assert Comparison("a", "ms", {Subject.THEIRS: [1.0]}).result is None


def test_our_figure_is_held_against_its_budget() -> None:
    result = Comparison("a", "ms", {Subject.OURS: [1.0, 3.0, 2.0]}, budget=1.5).result
    assert result is not None and result.figure == 2.0 and result.met is False
