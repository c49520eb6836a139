"""The fewest workers for a share of good requests equal what replays of every size give."""

from dataclasses import replace

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.fleet_size import find_fleet_sizes, most_replays
from kvatlas_simulator.lab.generated_requests import generate
from kvatlas_simulator.lab.report import size_rows, sizes_to_jsonable
from kvatlas_simulator.lab.study import Point, Study, compare

LARGEST = Point(8, 60_000, speed=8.0)
POLICIES = ("round-robin", "kvatlas")


def study(*policies: str, largest: Point = LARGEST) -> Study:
    return Study(generate("chat", 0, 120), policies, [largest], seeds=2, cost=StepCost(prefill_us_per_token=450.0))


def test_the_fewest_workers_are_those_that_replays_of_all_sizes_show() -> None:
    one = study(*POLICIES)
    sizes = [LARGEST._replace(workers=workers) for workers in range(1, LARGEST.workers + 1)]
    cells = compare(replace(one, points=sizes), jobs=2)
    shares = {(cell.summary.policy, cell.point.workers): cell.summary.mean.good for cell in cells}
    share = shares["kvatlas", 3]
    assert shares["kvatlas", 2] < share
    reports: list[int] = []
    found = find_fleet_sizes(one, share, 2, reports.append)
    assert reports == sorted(reports), "progress only grows"
    assert 0 < reports[-1] <= most_replays(one) * len(one.workload.requests), "to no more than what is announced"
    for size in found:
        assert size.workers is not None and size.summary is not None
        assert shares[size.policy, size.workers] >= share > shares.get((size.policy, size.workers - 1), 0.0)
        assert size.summary == next(
            c.summary for c in cells if c[0].workers == size.workers and c[1].policy == size.policy
        )
    row = dict(zip(("policy", "workers", "hours", "more"), size_rows(found)[1][:4], strict=True))
    assert row["policy"] == "kvatlas" and row["workers"] == "3" and row["more"] == "0%"
    document = sizes_to_jsonable(one, share, found)["results"]
    assert [result["fewest_workers"] for result in document] == [size.workers for size in found]


def test_a_policy_that_needs_more_workers_than_were_tried_says_so() -> None:
    one = study("round-robin", largest=LARGEST._replace(workers=1, speed=400.0))
    (size,) = find_fleet_sizes(one, 1.0, jobs=1)
    assert size.workers is None and size.to_jsonable()["at_fewest"] is None
    assert size_rows([size])[0][:3] == ("round-robin", "more than 1", "")


def test_a_request_larger_than_a_cache_is_one_clear_error() -> None:
    with pytest.raises(InvalidValue, match="never fits a cache of 640 tokens"):
        find_fleet_sizes(study("random", largest=Point(1, 640)), 0.5, 1)
