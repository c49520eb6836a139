"""`python -m benchmarks.lab [--study NAME] [TRACE...]`: replays traces, or generated workloads, and writes docs/results.md.

Without a name, the chapters that take under ten minutes together; `full`: `benchmarks.lab.study`, which takes hours.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lab.backends import write_backends
from benchmarks.lab.document import PICTURE, SIZES_PICTURE, Stopwatch, to_markdown, to_table, write_chapter
from benchmarks.lab.live import write_live
from benchmarks.lab.study import Row, count_points, run_study
from benchmarks.lab.study import to_markdown as study_to_markdown
from benchmarks.peer.dynamo.processes import PYTHON
from kvatlas.blocks.attention_groups import AttentionKind
from kvatlas_simulator.hybrid_cache.groups import CacheGroup
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.comparison import Point, Study, compare
from kvatlas_simulator.lab.fleet_size import find_fleet_sizes
from kvatlas_simulator.lab.generated_requests import WORKLOADS, generate
from kvatlas_simulator.lab.policies.catalogue import DEFAULT_POLICIES, DYNAMO
from kvatlas_simulator.lab.report import (
    SIZE_COLUMNS,
    save_picture,
    save_sizes_picture,
    size_rows,
    sizes_title,
    title_of,
)
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.traces import read_trace

GENERATED = ("agents", "tenants-bursty")
MOST_REQUESTS = 1_000
POINT = Point(workers=8, cache_tokens=500_000, speed=2.0)
FLAGS = "--workers 8 --cache-tokens 500000 --speed 2"
SEEDS = 2
TERMS = (
    "kvatlas",
    "kvatlas-no-reservations",
    "kvatlas-no-prefixes-in-flight",
    "kvatlas-no-interference",
    "kvatlas-no-learned-rates",
    "kvatlas-no-events",
    "kvatlas-3-replicas",
    "kvatlas-3-replicas-unshared",
)
HYBRID = CacheLayout((CacheGroup(AttentionKind.FULL), CacheGroup(AttentionKind.SLIDING_WINDOW, 1_024)))
HYBRID_TERMS = ("kvatlas", "kvatlas-no-marks", "oracle")
HYBRID_SEEDS = 3
SIGHTS = (
    "kvatlas",
    "kvatlas-true-rates",
    "kvatlas-true-loads",
    "kvatlas-true-loads-and-rates",
    "oracle",
    "weighted-scorers",
)
SIGHT_SEEDS = 3
SIGHT_SPEEDS = (1.0, 2.0)
SIZED = (
    "round-robin",
    "session",
    "weighted-scorers",
    "least-prefill-tokens",
    "prefix-tokens",
    "lmetric",
    "kvatlas",
    "oracle",
)
SIZED_POINT = Point(workers=48, cache_tokens=500_000, speed=4.0)
GOOD_SHARE = 0.9
UNRELIABLE = ("kvatlas", "kvatlas-no-events", "weighted-scorers")
DELAYS_MS = (5.0, 500.0, 2_000.0, 10_000.0, 60_000.0)
LOSSES = (0.0, 0.001, 0.01, 0.1)


def _jobs() -> int:
    return os.cpu_count() or 1


def _write_policies(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    policies = (*DEFAULT_POLICIES, DYNAMO) if PYTHON.exists() else DEFAULT_POLICIES
    pages = ["## Policies"]
    for number, workload in enumerate(workloads):
        study = Study(workload, policies, [POINT], SEEDS, dynamo_python=str(PYTHON))
        cells = compare(study, _jobs())
        command = f"{_command(workload)} {FLAGS} --seeds {SEEDS} --policies {','.join(policies)}"
        if number == 0:
            save_picture(study, cells, PICTURE)
        pages.append(to_markdown(f"### {workload.name}", command, [title_of(study, POINT)], study, cells))
    write_chapter("policies", "\n".join(pages), watch)


def _write_terms(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    pages = [
        "## Cost terms",
        "The loss without each term, and with three routers; then without marks, on hybrid engines: full attention and a "
        "sliding window share each cache.",
        "",
    ]
    for workload in workloads:
        study = Study(workload, TERMS, [POINT], SEEDS)
        command = f"{_command(workload)} {FLAGS} --seeds {SEEDS} --policies {','.join(TERMS)}"
        title = title_of(study, POINT)
        pages.append(to_markdown(f"### {workload.name}", command, [title], study, compare(study, _jobs())))
        hybrid = Study(workload, HYBRID_TERMS, [POINT], HYBRID_SEEDS, layout=HYBRID)
        command = (
            f"{_command(workload)} {FLAGS} --groups {HYBRID} --seeds {HYBRID_SEEDS} --policies {','.join(HYBRID_TERMS)}"
        )
        title = f"### {workload.name}, hybrid"
        pages.append(to_markdown(title, command, [title_of(hybrid, POINT)], hybrid, compare(hybrid, _jobs())))
    write_chapter("terms", "\n".join(pages), watch)


def _write_gap(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter on what the oracle knows and kvatlas does not, and its value."""
    pages = [
        "## Sources of the gap to the oracle",
        "kvatlas with its estimates replaced by true values: the engines' step costs as prices (`true-rates`), each engine's "
        "queue at the moment of the choice, in tokens left to compute (`true-loads`), or both. weighted-scorers for "
        "comparison: it looks for prefixes first.",
        "",
    ]
    for workload in workloads:
        points = [POINT._replace(speed=speed) for speed in SIGHT_SPEEDS]
        study = Study(workload, SIGHTS, points, SIGHT_SEEDS)
        flags = FLAGS.replace("--speed 2", f"--speed {','.join(f'{speed:g}' for speed in SIGHT_SPEEDS)}")
        command = f"{_command(workload)} {flags} --seeds {SIGHT_SEEDS} --policies {','.join(SIGHTS)}"
        titles = [title_of(study, point) for point in points]
        pages.append(to_markdown(f"### {workload.name}", command, titles, study, compare(study, _jobs())))
        write_chapter("gap", "\n".join(pages), watch)


def _write_fleet_sizes(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter on the workers that a policy saves."""
    pages = [
        "## Worker-hours for the same goodput",
        "The fewest workers with which the same share of requests is good, and their hours.",
        "",
    ]
    policies = (*SIZED, DYNAMO) if PYTHON.exists() else SIZED
    for workload in workloads:
        study = Study(workload, policies, [SIZED_POINT], SEEDS, dynamo_python=str(PYTHON))
        point = (
            f"--workers {SIZED_POINT.workers} --cache-tokens {SIZED_POINT.cache_tokens} --speed {SIZED_POINT.speed:g}"
        )
        command = (
            f"{_command(workload)} {point} --seeds {SEEDS} --good-share {GOOD_SHARE} --policies {','.join(policies)}"
        )
        sizes = find_fleet_sizes(study, GOOD_SHARE, _jobs())
        if workload is workloads[0]:
            save_sizes_picture(sizes, SIZES_PICTURE)
            pages.append(f"![worker-hours, {workload.name}]({SIZES_PICTURE.name})\n")
        title = sizes_title(study, SIZED_POINT, GOOD_SHARE)
        table = to_table(SIZE_COLUMNS, size_rows(sizes))
        pages.append(f"### {workload.name}\n\n```\n{command}\n```\n\n{title}\n\n{table}\n")
    write_chapter("sizes", "\n".join(pages), watch)


def _write_events(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter on late and lost events: when is kvatlas no better than policies without events? For the first
    workload."""
    workload = workloads[0]
    pages = ["## Late and lost events", f"{workload.name}; {', '.join(UNRELIABLE[1:])} use no events."]
    for flag, field, values in (
        ("--event-delay-ms", "event_delay_ms", DELAYS_MS),
        ("--event-loss", "event_loss", LOSSES),
    ):
        points = [POINT._replace(**{field: value}) for value in values]  # type: ignore[arg-type]  # both are floats
        study = Study(workload, UNRELIABLE, points, seeds=1)
        given = f"{flag} {','.join(f'{value:g}' for value in values)}"
        command = f"{_command(workload)} {FLAGS} --seeds 1 --policies {','.join(UNRELIABLE)} {given}"
        rows: list[tuple[str, ...]] = []
        for cell in compare(study, _jobs()):
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


def _write_study(workloads: Sequence[Workload], watch: Stopwatch, seeds: int) -> None:
    command = f'make lab STUDY=full SEEDS={seeds} TRACES="{" ".join(workload.name for workload in workloads)}"'
    python = str(PYTHON) if PYTHON.exists() else None

    def write(rows: Sequence[Row]) -> None:
        print(f"{len(rows)} points in {watch}", file=sys.stderr, flush=True)
        write_chapter("study", study_to_markdown(rows, command, seeds, count_points(len(workloads))), watch)

    run_study(workloads, seeds, python, write)


def _command(workload: Workload) -> str:
    return f"kvatlas replay {workload.name} --requests {len(workload.requests)}"


def _load(name: str, requests: int | None) -> Workload:
    workload = generate(name, 0, requests) if name in WORKLOADS and requests else read_trace(Path(name))
    return replace(workload, requests=workload.requests[:requests])


CHAPTERS = {
    "policies": _write_policies,
    "sizes": _write_fleet_sizes,
    "terms": _write_terms,
    "events": _write_events,
    "backends": write_backends,
}
"""Chapters of the short study, under ten minutes together on two free cores."""
SINGLE = {"gap": _write_gap, "live": write_live}
"""Chapters that are written only on request."""


def main(words: Sequence[str]) -> None:
    """Run the studies. `words`: the command line."""
    parser = argparse.ArgumentParser("benchmarks.lab", description=__doc__)
    parser.add_argument("--study", choices=("short", "full", *SINGLE, *CHAPTERS), default="short")
    parser.add_argument("--seeds", type=int, default=1, help="of the full study")
    parser.add_argument("traces", nargs="*")
    given = parser.parse_args(words)
    if given.study == "full":
        if not given.traces:
            parser.error('the full study needs traces: make lab STUDY=full TRACES="FILE ..."')
        _write_study([_load(name, None) for name in given.traces], Stopwatch(), given.seeds)
        return
    workloads = [_load(name, MOST_REQUESTS) for name in given.traces or GENERATED]
    if given.study in SINGLE:
        SINGLE[given.study](workloads, Stopwatch())
        return
    for name, write in CHAPTERS.items():
        if given.study in ("short", name):
            print(name, file=sys.stderr, flush=True)
            write(workloads, Stopwatch())


if __name__ == "__main__":
    main(sys.argv[1:])
