"""A router's own picks as load that workers have not reported yet."""

from kvatlas.cost import Load
from router_client.picks import FORGOTTEN_AFTER_US, RecentPicks
from tests.router_client.pools import pool, worker

SECOND_US = 1_000_000


def test_picks_since_the_last_sample_count_and_drain() -> None:
    picks, workers = RecentPicks(drain_tokens_per_s=1_000), pool(worker("w1", load={"sampled_us": 100}), worker("w2"))
    picks.add("w1", 3_000, 4_000, 99)
    picks.add("w1", 2_000, 2_500, 101)
    picks.add("w1", 500, 600, 101)
    assert picks.booked(workers, 101) == {"w1": Load(2, 2_500, 0, 3_100)}
    assert picks.booked(workers, 101 + SECOND_US) == {"w1": Load(2, 1_500, 0, 3_100)}
    assert picks.booked(workers, 101 + 4 * SECOND_US) == {"w1": Load(2, 0, 0, 3_100)}


def test_an_idle_gap_does_not_drain_what_comes_after() -> None:
    picks, workers = RecentPicks(drain_tokens_per_s=1_000), pool(worker("w1"))
    picks.add("w1", 100, 100, 1)
    picks.add("w1", 700, 700, 1 + SECOND_US)
    assert picks.booked(workers, 1 + SECOND_US) == {"w1": Load(2, 700, 0, 800)}


def test_a_newer_sample_has_seen_the_picks() -> None:
    picks = RecentPicks()
    picks.add("w1", 100, 100, 50)
    assert picks.booked(pool(worker("w1", load={"sampled_us": 50})), 60) == {}
    assert picks.booked(pool(worker("w1", load={"sampled_us": 0})), 60) == {}


def test_picks_are_forgotten_where_no_sample_comes() -> None:
    picks, workers = RecentPicks(), pool(worker("w1"))
    picks.add("w1", 100, 100, 1)
    assert "w1" in picks.booked(workers, FORGOTTEN_AFTER_US)
    assert picks.booked(workers, FORGOTTEN_AFTER_US + 1) == {}
