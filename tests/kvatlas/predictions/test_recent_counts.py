"""Counters have windows, and may go back."""

from kvatlas.predictions.recent_counts import RecentCounts


def test_growth_is_of_the_window_alone() -> None:
    now = [0.0]
    recent = RecentCounts(60.0, lambda: now[0])
    assert recent.grown({"late": 0}) == {"late": 0}
    now[0] = 30.0
    assert recent.grown({"late": 7}) == {"late": 7}
    now[0] = 59.0
    assert recent.grown({"late": 9}) == {"late": 9}
    now[0] = 95.0
    assert recent.grown({"late": 9}) == {"late": 2}
    now[0] = 125.0
    assert recent.grown({"late": 9}) == {"late": 0}
