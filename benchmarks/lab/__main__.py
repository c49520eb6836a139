"""`python -m benchmarks.lab [TRACE...]`: replays traces, or generated workloads, and writes docs/results.md with its picture.

Every table is a study of `kvatlas replay`, whose command stands above it.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab.document import LINES, to_markdown
from kvatlas.version import own_version
from simulator.lab.comparison import Cell, Point, Study, compare
from simulator.lab.generated_requests import WORKLOADS, generate
from simulator.lab.policies.catalogue import DEFAULT_POLICIES
from simulator.lab.report import save_picture, title_of
from simulator.lab.requests import Workload
from simulator.lab.traces import read_trace

RESULTS = Path("docs/results.md")
PICTURE = Path("docs/results.png")
GENERATED = ("agents", "tenants-bursty")
MOST_REQUESTS = 4_000
TERMS = (
    "kvatlas",
    "kvatlas-no-reservations",
    "kvatlas-no-prefixes-in-flight",
    "kvatlas-no-learned-rates",
    "kvatlas-no-events",
    "kvatlas-3-replicas",
    "kvatlas-3-replicas-unshared",
)
DELAYS_MS = (5.0, 500.0, 5_000.0, 30_000.0)


@dataclass(frozen=True, slots=True)
class Section:
    """A study, why it is made, and the flags of `kvatlas replay` that repeat it."""

    heading: str
    purpose: str
    study: Study
    flags: str


def sections_of(workload: Workload) -> list[Section]:
    """The studies of one workload."""
    point = Point(workers=8, cache_tokens=500_000, speed=2.0)
    flags = "--workers 8 --cache-tokens 500000 --speed 2"
    base = Study(workload, DEFAULT_POLICIES, [point], seeds=2)
    delays = [point._replace(event_delay_ms=delay_ms) for delay_ms in DELAYS_MS]
    return [
        Section(f"Policies: {workload.name}", "What each policy makes of it.", base, f"{flags} --seeds 2"),
        Section(
            f"Terms of the cost: {workload.name}",
            "What is lost without each, and with three routers.",
            replace(base, policies=TERMS),
            f"{flags} --seeds 2 --policies {','.join(TERMS)}",
        ),
        Section(
            f"Late events: {workload.name}",
            "At which delay does kvatlas become as good as a policy without events?",
            replace(base, policies=("kvatlas", "kvatlas-no-events"), points=delays, seeds=1),
            f"{flags} --seeds 1 --policies kvatlas,kvatlas-no-events "
            f"--event-delay-ms {','.join(f'{delay:g}' for delay in DELAYS_MS)}",
        ),
    ]


def _load(name: str) -> Workload:
    workload = generate(name, 0, MOST_REQUESTS) if name in WORKLOADS else read_trace(Path(name))
    return replace(workload, requests=workload.requests[:MOST_REQUESTS])


def main(names: Sequence[str]) -> None:
    began = time.monotonic()
    pages: list[str] = []
    for number, name in enumerate(names or GENERATED):
        for place, section in enumerate(sections_of(_load(name))):
            print(section.heading, file=sys.stderr, flush=True)
            cells: list[Cell] = compare(section.study, os.cpu_count() or 1)
            shown = Path(name).name if "/" in name else name
            command = f"kvatlas replay {shown} --requests {MOST_REQUESTS} {section.flags}"
            titles = [title_of(section.study, point) for point in section.study.points]
            pages.append(to_markdown(section.heading, section.purpose, command, titles, section.study, cells))
            if number == place == 0:
                save_picture(section.study, cells, PICTURE)
            _write(pages, time.monotonic() - began)


def _write(pages: Sequence[str], seconds: float) -> None:
    """After each study, so that one that is interrupted leaves those before it."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    head = LINES.format(
        version=own_version(), machine=machine, took=f"{seconds / 60:.0f} minutes", picture=PICTURE.name
    )
    RESULTS.write_text("\n".join([head, *pages]))


if __name__ == "__main__":
    main(sys.argv[1:])
