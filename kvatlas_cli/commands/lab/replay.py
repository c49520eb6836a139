"""`kvatlas replay`: compares policies on a request trace, in virtual time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import anyio
import typer

from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import print_json, print_notice, print_table
from kvatlas_simulator.lab.fleet_size import find_fleet_sizes, most_replays
from kvatlas_simulator.lab.generated_requests import REQUESTS, WORKLOADS, generate
from kvatlas_simulator.lab.miss_ratio import measure_curve, replayed_hit_rate, sizes_to_replay
from kvatlas_simulator.lab.report import (
    COLUMNS,
    CURVE_COLUMNS,
    SIZE_COLUMNS,
    curve_rows,
    curve_title,
    curve_to_jsonable,
    rows_of,
    save_picture,
    save_sizes_picture,
    size_rows,
    sizes_title,
    sizes_to_jsonable,
    title_of,
    to_jsonable,
)
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.settings import ReplaySettings
from kvatlas_simulator.lab.study import Study, compare, compare_live
from kvatlas_simulator.lab.traces import read_trace

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help=f"A file of JSON lines, also gzipped (Mooncake's traces, logs of OpenAI-style requests), or a generated workload: "
        f"{', '.join(WORKLOADS)}.",
    ),
]


@with_settings(ReplaySettings)
def replay(settings: ReplaySettings, trace: _Trace, as_json: JsonFlag = False) -> None:
    """Replay a request trace against simulated workers in virtual time, once for each policy, and compare them."""
    workload = generate(trace, 0, settings.requests or REQUESTS) if trace in WORKLOADS else read_trace(Path(trace))
    if settings.requests is not None:
        workload = replace(workload, requests=workload.requests[: settings.requests])
    if settings.curve:
        _print_curve(workload, settings, as_json=as_json)
        return
    study = Study(
        workload,
        settings.named_policies,
        settings.points,
        settings.seeds,
        settings.seed,
        settings.cpu_tokens,
        settings.layout,
        settings.cost,
        settings.objective,
        settings.dynamo_python or sys.executable,
    )
    if settings.good_share is not None:
        _print_sizes(study, settings, settings.good_share, as_json=as_json)
        return
    with _progress(len(study.runs) * len(workload.requests)) as on_progress:
        if settings.live:
            cells = anyio.run(compare_live, study, settings.live_scale, on_progress)
        else:
            cells = compare(study, settings.jobs, on_progress)
    if as_json:
        print_json(to_jsonable(study, cells))
    else:
        for point in study.points:
            print_table(title_of(study, point), COLUMNS, rows_of([cell for cell in cells if cell.point == point]))
    if settings.picture is not None:
        save_picture(study, cells, settings.picture)
        print_notice(f"picture: {settings.picture}")


def _print_sizes(study: Study, settings: ReplaySettings, good_share: float, *, as_json: bool) -> None:
    with _progress(most_replays(study) * len(study.workload.requests)) as on_progress:
        sizes = find_fleet_sizes(study, good_share, settings.jobs, on_progress)
    if as_json:
        print_json(sizes_to_jsonable(study, good_share, sizes))
    else:
        for point in study.points:
            mine = [one for one in sizes if one.largest == point]
            print_table(sizes_title(study, point, good_share), SIZE_COLUMNS, size_rows(mine))
    if settings.picture is not None:
        save_sizes_picture([one for one in sizes if one.largest == study.points[0]], settings.picture)
        print_notice(f"picture: {settings.picture}")


def _print_curve(workload: Workload, settings: ReplaySettings, *, as_json: bool) -> None:
    curve = measure_curve(workload, seed=settings.seed)
    replayed = {}
    to_replay = sizes_to_replay(workload, curve, settings.curve_replays)
    with _progress(len(to_replay)) as on_progress:
        for number, tokens in enumerate(to_replay, 1):
            replayed[tokens] = replayed_hit_rate(workload, tokens, settings.seed)
            on_progress(number)
    if as_json:
        print_json(curve_to_jsonable(workload, curve, replayed))
    else:
        print_table(curve_title(workload, curve), CURVE_COLUMNS, curve_rows(curve, replayed))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda replayed: bar.update(task, completed=replayed)
