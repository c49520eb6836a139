"""Compares live and virtual replays of the same requests."""

from collections.abc import Sequence
from dataclasses import replace

import anyio

from benchmarks.lab.document import Stopwatch, to_table, write_chapter
from kvatlas_simulator.lab.comparison import Cell, Point, Study, compare, compare_live
from kvatlas_simulator.lab.report import COLUMNS, rows_of, title_of
from kvatlas_simulator.lab.requests import Workload

REQUESTS = 400
POINT = Point(workers=4, cache_tokens=500_000, speed=1.0)
SCALE = 2.0
POLICIES = ("kvatlas",)


def write_live(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter `live`: half an hour of the first workload's requests, in scaled real time."""
    workload = workloads[0]
    study = Study(replace(workload, requests=workload.requests[:REQUESTS]), POLICIES, [POINT], seeds=1)
    live, virtual = anyio.run(compare_live, study, SCALE), compare(study, jobs=1)
    flags = f"--workers {POINT.workers} --cache-tokens {POINT.cache_tokens} --speed {POINT.speed:g} --seeds 1"
    command = f"kvatlas replay {workload.name} --requests {REQUESTS} {flags} --policies {','.join(POLICIES)}"
    rows = [(f"{row[0]}, {how}", *row[1:]) for how, cells in _both(live, virtual) for row in rows_of(cells)]
    apart = max(
        abs(one.summary.mean.hit_rate - other.summary.mean.hit_rate) for one, other in zip(live, virtual, strict=True)
    )
    text = [
        "## Live and virtual",
        "Over real NATS, Valkey, indexer, publishers and routers (`--live`), and in virtual time. Live, events and choices "
        f"take the time that this machine needs. The hit rates differ by {apart * 100:.1f} percentage points.",
        "",
        "```",
        f"{command} --live --live-scale {SCALE:g}",
        command,
        "```",
        "",
        title_of(study, POINT),
        "",
        to_table(COLUMNS, rows),
    ]
    write_chapter("live", "\n".join(text), watch)


def _both(live: list[Cell], virtual: list[Cell]) -> list[tuple[str, list[Cell]]]:
    return [("live", live), ("virtual", virtual)]
