"""Replays one workload at every point of a grid, for each policy and seed, on all cores."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from kvatlas.errors import InvalidValue
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.policies.catalogue import DYNAMO_POLICIES, LIVE_POLICIES, POLICIES
from kvatlas_simulator.lab.policies.dynamo.policy import check_installed
from kvatlas_simulator.lab.replay import FleetSettings, replay
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.summary import Figures, Objective, Summary

Task = TypeVar("Task")
Result = TypeVar("Result")

_PROGRESS_S = 0.25
_PROGRESS_REQUESTS = 256


class Point(NamedTuple):
    """One fleet under one load. `speed`: requests arrive this many times as fast as in the trace. `event_loss`: a
    fraction."""

    workers: int = 16
    cache_tokens: int = 500_000
    speed: float = 1.0
    event_delay_ms: float = 5.0
    event_loss: float = 0.0

    def to_fleet(self, study: "Study") -> FleetSettings:
        return FleetSettings(
            self.workers,
            self.cache_tokens,
            study.cpu_tokens,
            study.layout,
            cost=study.cost,
            event_delay_us=self.event_delay_ms * 1e3,
            event_loss=self.event_loss,
            dynamo_python=study.dynamo_python,
        )


@dataclass(frozen=True, slots=True)
class Study:
    """What to compare. Seeds are counted from `first_seed`."""

    workload: Workload
    policies: Sequence[str]
    points: Sequence[Point]
    seeds: int = 3
    first_seed: int = 0
    cpu_tokens: int = 0
    layout: CacheLayout = field(default_factory=CacheLayout)
    cost: StepCost = field(default_factory=StepCost)
    objective: Objective = field(default_factory=Objective)
    dynamo_python: str = sys.executable

    @property
    def runs(self) -> list[tuple[Point, str, int]]:
        """List each replay once: event delay and loss don't affect policies that use no events."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return list(
            dict.fromkeys(
                (with_effective_events(p, name), name, s) for p in self.points for name in self.policies for s in seeds
            )
        )


class Cell(NamedTuple):
    """A policy's result at one point."""

    point: Point
    summary: Summary


def compare(study: Study, jobs: int, on_progress: Callable[[int], None] = lambda requests: None) -> list[Cell]:
    """A cell for each point and policy, in their order. `on_progress` gets the number of requests replayed so far.

    Raises InvalidValue for a request that fits no engine, or for Dynamo if that is not installed.
    """
    runs = study.runs
    found = dict(zip(runs, run_in_processes(study, jobs, _run, runs, on_progress), strict=True))
    seeds = range(study.first_seed, study.first_seed + study.seeds)
    return [
        Cell(point, Summary.of(name, [found[with_effective_events(point, name), name, seed] for seed in seeds]))
        for point in study.points
        for name in study.policies
    ]


def run_in_processes(
    study: Study,
    jobs: int,
    function: Callable[[Study, Task], Result],
    tasks: Sequence[Task],
    on_progress: Callable[[int], None],
) -> list[Result]:
    """The results of a module's function, in the order of the tasks. It may call `replay_once`; `on_progress` gets the
    number of requests replayed so far. Raises whatever the function raises, or InvalidValue for Dynamo if that is not
    installed."""
    if any(name in DYNAMO_POLICIES for name in study.policies):
        check_installed(study.dynamo_python)
    context = get_context("spawn")
    replayed = context.Value("q")
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _share, (study, replayed)) as pool:
        futures = [pool.submit(_call, function, task) for task in tasks]
        try:
            open_tasks = set(futures)
            while open_tasks:
                done, open_tasks = wait(open_tasks, _PROGRESS_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                on_progress(replayed.value)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [future.result() for future in futures]


async def compare_live(
    study: Study, scale: float, on_progress: Callable[[int], None] = lambda requests: None
) -> list[Cell]:
    """Like `compare`, but over real servers, one replay after another; `scale` virtual seconds take one real second.

    Raises InvalidValue for a policy that is not one of kvatlas', or KvatlasError for a server that does not start.
    """
    from kvatlas_simulator.lab.live import replay_live  # a replay in virtual time needs neither servers nor clients

    for name in study.policies:
        if name not in LIVE_POLICIES:
            raise InvalidValue(f"policy {name} can't be replayed live; expected {', '.join(LIVE_POLICIES)}")
    cells: list[Cell] = []
    requests = len(study.workload.requests)
    for point in study.points:
        if point != _with_usual_events(point):
            raise InvalidValue(
                "the delay and loss of events in a live replay come from its servers; expected neither flag"
            )
        fleet = point.to_fleet(study)
        for name in study.policies:
            figures: list[Figures] = []
            for seed in range(study.first_seed, study.first_seed + study.seeds):
                atlas, replayed = POLICIES[name].atlas, (len(cells) * study.seeds + len(figures)) * requests
                assert atlas is not None

                def report(arrived: int, before: int = replayed) -> None:
                    on_progress(before + arrived)

                outcome = await replay_live(
                    study.workload,
                    atlas,
                    fleet,
                    seed,
                    speed=point.speed,
                    scale=scale,
                    on_progress=report,
                )
                figures.append(Figures.of(outcome, study.objective))
            cells.append(Cell(point, Summary.of(name, figures)))
    return cells


def with_effective_events(point: Point, policy: str) -> Point:
    """The point, with default settings for events if the policy uses none, since their delay and loss then don't
    matter."""
    return point if POLICIES[policy].uses_events else _with_usual_events(point)


def _with_usual_events(point: Point) -> Point:
    """The point with the default delay and no loss of events."""
    return point._replace(event_delay_ms=Point().event_delay_ms, event_loss=0.0)


_shared: tuple[Study, Any] | None = None
"""In a child process: the study, and the count of requests replayed by all children."""


def _share(study: Study, replayed: Any) -> None:
    global _shared
    _shared = study, replayed
    Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # a trace is a million objects: collecting garbage among them repeatedly would take a quarter of a replay


def _end_with_parent() -> None:
    """End this child when its study is killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[[Study, Task], Result], task: Task) -> Result:
    assert _shared is not None
    return function(_shared[0], task)


def _run(study: Study, run: tuple[Point, str, int]) -> Figures:
    return replay_once(*run)


def replay_once(point: Point, policy: str, seed: int) -> Figures:
    """Replay a study's workload once; call it in a child of `run_in_processes`."""
    assert _shared is not None
    study, replayed = _shared
    reported = 0

    def report(arrived: int) -> None:
        nonlocal reported
        if arrived - reported >= _PROGRESS_REQUESTS or arrived == len(study.workload.requests):
            with replayed.get_lock():
                replayed.value += arrived - reported
            reported = arrived

    outcome = replay(study.workload, policy, point.to_fleet(study), seed, speed=point.speed, on_progress=report)
    report(len(study.workload.requests))
    return Figures.of(outcome, study.objective)
