"""The study: every policy on each trace, at two sizes of fleet, three sizes of cache, moderate and high load, and with three
routers. It shows how far kvatlas is from the oracle, and whether any policy that does not see the caches answers sooner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.lab.document import to_table
from kvatlas_simulator.lab.comparison import Point, Study, compare
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.summary import Figures

BLIND = ("least-loaded", "session", "prefix-hash", "cache-aware-tree", "weighted-scorers", "prefix-tokens", "lmetric")
OURS = ("kvatlas", "kvatlas-3-replicas")
CLOSE = 0.97
"""Share of the oracle's hit rate."""
WORKERS = {8: 1_500, 16: 2_000}
"""Requests by fleet size: a larger fleet needs more of them until its caches are full."""
CACHE_TOKENS = (250_000, 500_000, 1_000_000)
LOADS = {"moderate": 1.0, "high": 2.0}
"""Times the trace's rate with 8 workers; with 16 twice that."""


class Row(NamedTuple):
    """The policies' results for this many requests of one trace at one point; means over the seeds."""

    trace: str
    load: str
    point: Point
    figures: Mapping[str, Figures]
    requests: int

    @property
    def blind(self) -> list[str]:
        """The replayed policies that don't see the caches."""
        return [name for name in BLIND if name in self.figures]

    def best_blind(self, figure: str) -> tuple[str, float]:
        """The policy that has the lowest figure among those that don't see the caches."""
        found = {name: float(getattr(self.figures[name], figure)) for name in self.blind}
        best = min(found, key=found.__getitem__)
        return best, found[best]

    def close(self, policy: str) -> bool:
        return self.figures[policy].hit_rate >= CLOSE * self.figures["oracle"].hit_rate

    def first(self, policy: str, figure: str) -> bool:
        return bool(getattr(self.figures[policy], figure) <= self.best_blind(figure)[1])


def count_points(traces: int) -> int:
    return traces * len(WORKERS) * len(LOADS) * len(CACHE_TOKENS)


def run_study(
    workloads: Sequence[Workload], seeds: int, dynamo_python: str | None, on_row: Callable[[Sequence[Row]], None]
) -> None:
    """Run the study. `on_row` gets all rows so far after each point."""
    policies = (*BLIND, *OURS, *(["dynamo"] if dynamo_python else []), "oracle")
    rows: list[Row] = []
    for workload in workloads:
        for workers, requests in WORKERS.items():
            part = replace(workload, requests=workload.requests[:requests])
            for load, speed in LOADS.items():
                for cache_tokens in CACHE_TOKENS:
                    point = Point(workers, cache_tokens, speed * workers / min(WORKERS))
                    study = Study(part, policies, [point], seeds)
                    if dynamo_python:
                        study = replace(study, dynamo_python=dynamo_python)
                    cells = compare(study, jobs=1 if seeds == 1 else 2)
                    figures = {cell.summary.policy: cell.summary.mean for cell in cells}
                    rows.append(Row(workload.name, load, point, figures, len(part.requests)))
                    on_row(rows)


def to_markdown(rows: Sequence[Row], command: str, seeds: int, points: int) -> str:
    """The study's chapter. `points`: number of points of the complete study."""
    lines = [
        "## Distance from the oracle",
        "Public traces at two sizes of fleet, three sizes of cache and two loads: moderate is the trace's rate with 8 workers, "
        f"and twice that with 16; high is twice as much. **Blind** policies do not see the caches ({', '.join(BLIND)}). "
        f"{seeds} seed{'s' if seeds > 1 else ''}; requests from the trace's beginning, with empty caches.",
        "",
        "```",
        command,
        "```",
        "",
        *([] if len(rows) == points else [f"**{len(rows)} of {points} points**: the study was stopped here.", ""]),
        *_findings(rows),
        "",
    ]
    names = [name for name in ("oracle", *OURS, "dynamo") if any(name in row.figures for row in rows)]
    for figure, title in (
        ("hit_rate", "Prompt tokens found cached"),
        ("ttft_mean_ms", "Mean time to first token, ms"),
        ("ttft_p99_ms", "p99 of the time to first token, ms"),
    ):
        columns = ["trace", "load", "workers", "cache tokens", "requests", *names, "best of the blind"]
        table = [[*_place(row), *_values(row, figure, names)] for row in rows]
        lines += [f"**{title}**", "", to_table(columns, table), ""]
    return "\n".join(lines)


def _findings(rows: Sequence[Row]) -> list[str]:
    lines = []
    for policy in (*OURS, "dynamo"):
        mine = [row for row in rows if policy in row.figures]
        if not mine:
            continue
        apart = [(row.figures["oracle"].hit_rate - row.figures[policy].hit_rate) * 100 for row in mine]
        lines.append(
            f"- **{policy}**: of {len(mine)} points, at least {CLOSE:.0%} of the oracle's hit rate at "
            f"{sum(row.close(policy) for row in mine)}, {max(apart):.1f} percentage points below it at worst; "
            f"mean TTFT no worse than any blind policy's at {sum(row.first(policy, 'ttft_mean_ms') for row in mine)}, "
            f"p99 at {sum(row.first(policy, 'ttft_p99_ms') for row in mine)}."
        )
    missed = [
        f"{_short(row)}: {figure} {getattr(row.figures['kvatlas'], field):,.0f} ms, {row.best_blind(field)[0]} "
        f"{row.best_blind(field)[1]:,.0f} ms"
        for figure, field in (("mean", "ttft_mean_ms"), ("p99", "ttft_p99_ms"))
        for row in rows
        if not row.first("kvatlas", field)
    ]
    if missed:
        lines += ["", "A blind policy answers sooner than kvatlas here:", *(f"- {one}" for one in missed)]
    return lines


def _short(row: Row) -> str:
    return f"{row.trace.partition('_')[0]}, {row.load}, {row.point.workers} workers of {row.point.cache_tokens:,}"


def _place(row: Row) -> list[str]:
    trace, point = row.trace.partition("_")[0], row.point
    return [trace, row.load, str(point.workers), f"{point.cache_tokens:,}", f"{row.requests:,}"]


def _values(row: Row, figure: str, names: Sequence[str]) -> list[str]:
    def shown(value: float) -> str:
        return f"{value:.1%}" if figure == "hit_rate" else f"{value:,.0f}"

    values = [shown(getattr(row.figures[name], figure)) if name in row.figures else "-" for name in names]
    if figure == "hit_rate":
        best = max(row.blind, key=lambda name: row.figures[name].hit_rate)
        return [*values, f"{shown(row.figures[best].hit_rate)} ({best})"]
    best, least = row.best_blind(figure)
    return [*values, f"{shown(least)} ({best})"]
