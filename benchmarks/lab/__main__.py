"""`python -m benchmarks.lab [--study NAME] [TRACE...]`: compares policies on generated workloads and on these traces, and
writes docs/results.md.

Without a name, it runs the chapters in `SHORT`; `full` repeats them with more requests, which takes hours.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lab import grid
from benchmarks.lab.document import Stopwatch, to_table, write_chapter
from benchmarks.peer.dynamo.processes import PYTHON
from kvatlas_simulator.lab.generated_requests import WORKLOADS, generate
from kvatlas_simulator.lab.policies.catalogue import DYNAMO_POLICIES
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.study import Point, Study, compare
from kvatlas_simulator.lab.traces import read_trace

JOBS = len(os.sched_getaffinity(0))
GENERATED = ("agents",)
MOST_REQUESTS = 600
GRID_REQUESTS = {"short": 300, "full": 1_500}
GRID_SEEDS = 5
POINT = Point(workers=8, cache_tokens=500_000, speed=2.0)
FLAGS = "--workers 8 --cache-tokens 500000 --speed 2"
UNRELIABLE = ("kvatlas", "kvatlas-no-events", "inference-extension")
DELAYS_MS = (5.0, 2_000.0, 60_000.0)
LOSSES = (0.0, 0.01, 0.1)


def _write_grid(traces: Sequence[str], watch: Stopwatch, study: str, seeds: int, kept: Path | None) -> None:
    """Write the chapter with the table of all rivals."""
    requests, dynamo = GRID_REQUESTS[study], DYNAMO_POLICIES if PYTHON.exists() else ()
    policies = (grid.OUR, *grid.RIVALS, *(grid.OTHERS if study == "full" else ()), *dynamo)
    results = grid.run_grid(grid.cases_of(traces), policies, grid.LOADS, seeds, requests, str(PYTHON), JOBS, kept)
    command = f'make lab STUDY={study if study == "full" else "grid"} SEEDS={seeds} TRACES="{" ".join(traces)}"'
    write_chapter("grid", grid.to_markdown(results, command, seeds, requests), watch)


def _write_terms(traces: Sequence[str], watch: Stopwatch, study: str, seeds: int, kept: Path | None) -> None:
    """Write the chapter on the terms of the cost."""
    requests = GRID_REQUESTS[study]
    results = grid.run_grid(
        grid.cases_of(traces), (grid.OUR, *grid.TERMS), grid.BUSY_LOADS, seeds, requests, str(PYTHON), JOBS, kept
    )
    command = f'make lab STUDY=terms SEEDS={seeds} TRACES="{" ".join(traces)}"'
    write_chapter("terms", grid.terms_to_markdown(results, command, seeds, requests), watch)


def _write_events(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter on late and lost events: when is kvatlas no better than policies without events? Uses the first
    workload."""
    workload = workloads[0]
    without = ", ".join(UNRELIABLE[1:])
    pages = ["## Late and lost events", f"Workload: {workload.name}. Policies without events: {without}."]
    for flag, field, values in (
        ("--event-delay-ms", "event_delay_ms", DELAYS_MS),
        ("--event-loss", "event_loss", LOSSES),
    ):
        points = [POINT._replace(**{field: value}) for value in values]  # type: ignore[arg-type]  # both are floats
        study = Study(workload, UNRELIABLE, points, seeds=1)
        given = f"{flag} {','.join(f'{value:g}' for value in values)}"
        command = f"{_command(workload)} {FLAGS} --seeds 1 --policies {','.join(UNRELIABLE)} {given}"
        rows: list[tuple[str, ...]] = []
        for cell in compare(study, JOBS):
            name, mean = cell.summary.policy, cell.summary.mean
            if name == "kvatlas":
                name += (
                    f", {cell.point.event_delay_ms:g} ms late"
                    if field == "event_delay_ms"
                    else (f", {cell.point.event_loss:.1%} of messages lost")
                )
            row = (name, f"{mean.hit_rate:.1%}", f"{mean.ttft_mean_ms:,.0f}", f"{mean.ttft_p99_ms:,.0f}")
            if row not in rows:
                rows.append(row)
        pages += ["", "```", command, "```", "", to_table(("policy", "hit rate", "TTFT mean ms", "p99"), rows)]
    write_chapter("events", "\n".join(pages), watch)


def _command(workload: Workload) -> str:
    return f"kvatlas replay {workload.name} --requests {len(workload.requests)}"


def _load(name: str, requests: int) -> Workload:
    workload = generate(name, 0, requests) if name in WORKLOADS else read_trace(Path(name))
    return replace(workload, requests=workload.requests[:requests])


ON_GRID = {"grid": _write_grid, "terms": _write_terms}
CHAPTERS = {"events": _write_events}
SHORT = ("grid", "events")
"""The chapters of the short study."""


def main(words: Sequence[str]) -> None:
    """Run the studies. `words`: the command line."""
    parser = argparse.ArgumentParser("benchmarks.lab", description=__doc__)
    parser.add_argument("--study", choices=("short", "full", *ON_GRID, *CHAPTERS), default="short")
    parser.add_argument("--seeds", type=int, default=GRID_SEEDS, help="of the grid")
    parser.add_argument("--kept", type=Path, help="a file for the grid's figures, so that an interrupted study goes on")
    parser.add_argument("traces", nargs="*")
    given = parser.parse_args(words)
    study = "full" if given.study == "full" else "short"
    chosen = {"short": SHORT, "full": (*ON_GRID, *CHAPTERS)}.get(given.study, (given.study,))
    for name in chosen:
        print(name, file=sys.stderr, flush=True)
        if name in ON_GRID:
            ON_GRID[name](given.traces, Stopwatch(), study, given.seeds, given.kept)
        else:
            CHAPTERS[name]([_load(one, MOST_REQUESTS) for one in given.traces or GENERATED], Stopwatch())


if __name__ == "__main__":
    main(sys.argv[1:])
