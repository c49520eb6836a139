"""Finds how many workers each policy needs for the same goodput."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kvatlas_simulator.lab.study import Point, Study, replay_once, run_in_processes, with_effective_events
from kvatlas_simulator.lab.summary import Summary


class FleetSize(NamedTuple):
    """`summary`: the figures of the smallest fleet that meets the objective for enough requests; None if not even `largest`
    does."""

    policy: str
    largest: Point
    workers: int | None
    summary: Summary | None

    def to_jsonable(self) -> dict[str, Any]:
        found = None if self.summary is None else self.summary.to_jsonable()
        return {**self.largest._asdict(), "policy": self.policy, "fewest_workers": self.workers, "at_fewest": found}


def find_fleet_sizes(
    study: Study, good_share: float, jobs: int, on_progress: Callable[[int], None] = lambda requests: None
) -> list[FleetSize]:
    """For each point and policy, the fewest workers with which `good_share` of the requests are good (mean over the seeds),
    found by bisection below the point's own number of workers.

    Assumes that more workers are better; otherwise, a smaller fleet than the one found may do just as well. Raises
    InvalidValue, as `compare` does.
    """
    tasks = [(point, policy, good_share) for point in study.points for policy in study.policies]
    return run_in_processes(study, jobs, _find, tasks, on_progress)


def most_replays(study: Study) -> int:
    """Upper bound on the number of replays that a search takes, over all points, policies and seeds."""
    sizes = sum(1 + (point.workers - 1).bit_length() for point in study.points)
    return sizes * len(study.policies) * study.seeds


def _find(study: Study, task: tuple[Point, str, float]) -> FleetSize:
    largest, policy, good_share = task

    @cache
    def at(workers: int) -> Summary:
        point = with_effective_events(largest, policy)._replace(workers=workers)
        seeds = range(study.first_seed, study.first_seed + study.seeds)
        return Summary.of(policy, [replay_once(point, policy, seed) for seed in seeds])

    too_few, enough = 0, largest.workers
    if at(enough).mean.good < good_share:
        return FleetSize(policy, largest, None, None)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if at(middle).mean.good < good_share:
            too_few = middle
        else:
            enough = middle
    return FleetSize(policy, largest, enough, at(enough))
