"""Screens of `kvatlas top`, from made-up samples."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import Diagnosis, FleetRecord, ForwardPassMetrics, Liveness, WorkerState
from kvatlas_cli.top.sample import FleetSample, RouterSample, WorkerSample
from kvatlas_cli.top.screen import View, render, sort_workers
from tests.router_client.pools import worker

NOW_US = 1_700_000_000_000_000


def one(worker_id: str, blocks: int, usage: float = 0.5, **changed: Any) -> WorkerSample:
    load = WorkerState(
        id=worker_id, running_decodes=3, forward_pass=ForwardPassMetrics(cache_usage=usage, prefix_hit_rate=0.25)
    )
    fields = {
        **worker(worker_id).model_dump(),
        "load": load,
        "heard_us": NOW_US - 1_500_000,
        "applied_us": NOW_US - 300_000,
    }
    record = FleetRecord(**{**fields, **changed})
    return WorkerSample(record, {Tier.HBM: blocks}, 7, (), 12, "indexer-a")


def sample(workers: Sequence[WorkerSample], answers: int = 100, seconds: int = 0) -> FleetSample:
    router = RouterSample("router-1", "m", answers, 80, 72, 4_000, 1_000)
    by_id = {each.record.endpoint.id: each for each in workers}
    return FleetSample(NOW_US + seconds * 1_000_000, by_id, ["a", "b"], 64, 63, [router])


FLEET = sample([one("w-b", 20), one("w-a", 3_000), one("w-c", 1, liveness=Liveness.LOST)])


def test_a_screen_of_80_columns_has_every_figure() -> None:
    lines = render(sample(list(FLEET.workers.values()), 150, 2), FLEET, View(selected="w-a"), 80, 24)
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    assert lines[0].endswith("2 of 3 workers routable   2 indexers, 63 of 64 partitions owned")
    assert lines[1] == "1 router   150 answers, 25.0/s   hit rate 25%   90.0% as predicted"
    assert lines[3].split() == ["WORKER", "STATE", "BLOCKS", "BEHIND", "RUN", "WAIT", "CACHE", "HIT", "EVENT", "HEARD"]
    assert lines[4].split() == [">w-a", "up", "3,000", "7", "3", "0", "50%", "25%", "2.3", "s", "3.5", "s"]
    assert "lost" in lines[6] and lines[9].split() == ["router-1", "m", "150", "50", "25%", "90%"]
    assert lines[-1].startswith("q quit   s sort (worker)")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    workers = [one("a-very-long-worker-name-" + "x" * 40, 10**12), *FLEET.workers.values()]
    for view in (View(), View(opened="w-a"), View(opened=workers[0].record.endpoint.id)):
        lines = render(sample(workers), None, view, width, 24, "the store does not answer; trying again " + "x" * 90)
        assert max(map(len, lines)) <= max(width, 40)


def test_keys_sort_select_open_and_leave() -> None:
    view: View | None = View()
    order = sort_workers(FLEET, View())
    assert order == ["w-a", "w-b", "w-c"]
    for key, selected, opened in (
        ("down", "w-a", ""),
        ("j", "w-b", ""),
        ("enter", "w-b", "w-b"),
        ("down", "w-c", "w-c"),
        ("end", "w-c", "w-c"),
        ("escape", "w-c", ""),
        ("k", "w-b", ""),
        ("home", "w-a", ""),
        ("x", "w-a", ""),
    ):
        assert view is not None
        view = view.press(key, order)
        assert view is not None and (view.selected, view.opened) == (selected, opened), key
    assert view is not None and view.press("q", order) is None
    first = View().press("enter", order)
    assert first is not None and (first.selected, first.opened) == ("w-a", "w-a"), "the first one"
    assert View().press("enter", []) == View()
    assert sort_workers(FLEET, View(sort=1))[0] == "w-c"  # what needs attention
    by_blocks = View().press("s", order)
    assert by_blocks is not None
    by_blocks = by_blocks.press("s", order)
    assert by_blocks is not None and sort_workers(FLEET, by_blocks) == ["w-a", "w-b", "w-c"]
    upside_down = by_blocks.press("r", order)
    assert upside_down is not None and sort_workers(FLEET, upside_down) == ["w-c", "w-b", "w-a"]


def test_an_opened_worker_has_what_is_known_of_it_and_what_its_publisher_finds_wrong() -> None:
    opened = one("w-a", 3_000, doubt="a gap")
    wrong = [Diagnosis(name="feed", seen="the event socket brings nothing", cure="set --endpoint")]
    opened = WorkerSample(opened.record, opened.blocks, None, wrong, 12, "")
    text = "\n".join(render(sample([opened]), None, View(opened="w-a"), 80, None))
    for part in ("in doubt: a gap", "3,000 hbm", "12, followed by no indexer", "unknown", "25% of prompt tokens hit"):
        assert part in text
    assert "wrong        the event socket brings nothing -> set --endpoint" in text


def test_of_many_workers_those_around_the_selected_one_are_shown() -> None:
    many = sample([one(f"w{number:03}", number) for number in range(200)])
    lines = render(many, None, View(selected="w150"), 80, 24)
    assert len(lines) == 24 and any(line.startswith(">w150") for line in lines)
    assert any("more workers" in line for line in lines) and any("router-1" in line for line in lines)
    everything = render(many, None, View(), 80, None)
    assert sum(line.startswith(" w") for line in everything) == 200
