"""A study's result as table rows, as JSON, and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvatlas.errors import InvalidValue
from kvatlas.version import own_version
from kvatlas_simulator.lab.fleet_size import FleetSize
from kvatlas_simulator.lab.miss_ratio import MissRatioCurve
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.study import Cell, Point, Study
from kvatlas_simulator.lab.summary import Summary

COLUMNS = (
    "policy",
    "hit rate",
    "TTFT mean ms",
    "p50 / p90 / p99",
    "TPOT p50 / p90 / p99 ms",
    "good requests",
    "goodput /s",
    "fullest engine",
    "prefill tokens",
    "busy",
)
SIZE_COLUMNS = (
    "policy",
    "workers",
    "worker-hours",
    "more than the least",
    "good requests",
    "hit rate",
    "TTFT mean ms",
    "TTFT p99 ms",
)
CURVE_COLUMNS = ("cache tokens", "hit rate", "replayed", "error")
_AXES = {
    "workers": "workers",
    "cache_tokens": "cache tokens of each worker",
    "speed": "times the trace's rate",
    "event_delay_ms": "delay of events, ms",
    "event_loss": "lost messages",
}


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """One row per policy, from the cells of one point; with several seeds, each mean has its 95 % margin."""
    return [_row(cell.summary) for cell in cells]


def title_of(study: Study, point: Point) -> str:
    """The conditions at a point, as a title."""
    parts = [
        f"{study.workload.name}: {len(study.workload.requests):,} requests at {point.speed:g} x the trace's rate",
        f"{point.workers} workers of {point.cache_tokens:,} tokens"
        + (f" in groups {study.layout}" if study.layout.is_hybrid else ""),
        f"{study.seeds} seed{'s' if study.seeds > 1 else ''}",
    ]
    if (point.event_delay_ms, point.event_loss) != (Point().event_delay_ms, 0.0):
        parts.append(f"events {point.event_delay_ms:g} ms late, {point.event_loss:.1%} of messages lost")
    objective = study.objective
    parts.append(f"good: TTFT {objective.ttft_ms:g} ms, TPOT {objective.tpot_ms:g} ms")
    return "; ".join(parts)


def _row(one: Summary) -> tuple[str, ...]:
    mean, margin, several = one.mean, one.margin, one.seeds > 1

    def shown(name: str, form: str) -> str:
        text = f"{getattr(mean, name):{form}}"
        return f"{text} ±{getattr(margin, name):{form}}" if several else text

    return (
        one.policy,
        shown("hit_rate", ".1%"),
        shown("ttft_mean_ms", ",.0f"),
        f"{mean.ttft_p50_ms:,.0f} / {mean.ttft_p90_ms:,.0f} / {shown('ttft_p99_ms', ',.0f')}",
        f"{mean.tpot_p50_ms:.0f} / {mean.tpot_p90_ms:.0f} / {mean.tpot_p99_ms:.0f}",
        shown("good", ".1%"),
        f"{mean.goodput_per_s:.2f}",
        f"{mean.imbalance:.2f} x mean",
        f"{mean.prefilled_tokens:,.0f}",
        f"{mean.busy:.0%}",
    )


def to_jsonable(study: Study, cells: Sequence[Cell]) -> dict[str, Any]:
    """All results and the conditions. The same study gives the same document."""
    return {
        **_made_by(study),
        "results": [{**cell.point._asdict(), **cell.summary.to_jsonable()} for cell in cells],
    }


def _made_by(study: Study) -> dict[str, Any]:
    return {
        "kvatlas": own_version(),
        "workload": study.workload.name,
        "requests": len(study.workload.requests),
        "prompt_tokens": study.workload.prompt_tokens,
        "block_tokens": study.workload.block_tokens,
        "seeds": list(range(study.first_seed, study.first_seed + study.seeds)),
        "objective": {"ttft_ms": study.objective.ttft_ms, "tpot_ms": study.objective.tpot_ms},
        "cpu_tokens": study.cpu_tokens,
        "groups": [str(group) for group in study.layout.groups],
        "retention_interval": study.layout.retention_interval,
        "step_cost": {name: getattr(study.cost, name) for name in study.cost.__slots__},
    }


def sizes_title(study: Study, point: Point, good_share: float) -> str:
    """The conditions of the fleet sizes at a point, as a title."""
    return f"{title_of(study, point)}; fewest workers, of up to {point.workers}, with {good_share:.4g} of the requests good"


def size_rows(sizes: Sequence[FleetSize]) -> list[tuple[str, ...]]:
    """One row per policy, from the sizes of one point."""
    least = min((one.summary.mean.worker_hours for one in sizes if one.summary is not None), default=0.0)
    rows: list[tuple[str, ...]] = []
    for one in sizes:
        if one.summary is None:
            rows.append((one.policy, f"more than {one.largest.workers}", *[""] * (len(SIZE_COLUMNS) - 2)))
            continue
        mean = one.summary.mean
        rows.append(
            (
                one.policy,
                f"{one.workers}",
                f"{mean.worker_hours:,.3f}",
                f"{mean.worker_hours / least - 1:.0%}",
                f"{mean.good:.1%}",
                f"{mean.hit_rate:.1%}",
                f"{mean.ttft_mean_ms:,.0f}",
                f"{mean.ttft_p99_ms:,.0f}",
            )
        )
    return rows


def sizes_to_jsonable(study: Study, good_share: float, sizes: Sequence[FleetSize]) -> dict[str, Any]:
    """All sizes and the conditions."""
    return {**_made_by(study), "good_share": good_share, "results": [one.to_jsonable() for one in sizes]}


def save_sizes_picture(sizes: Sequence[FleetSize], path: Path) -> None:
    """Plot bars of worker-hours by policy, for one point. Raises InvalidValue, as `save_picture` does."""
    with _figure(1, (8, 4.8), path) as (panel,):
        found = [(one.policy, one.summary) for one in sizes if one.summary is not None]
        panel.barh([policy for policy, _ in found], [summary.mean.worker_hours for _, summary in found])
        panel.invert_yaxis()
        panel.set(title="worker-hours for the same share of good requests", xlabel="worker-hours")


def curve_title(workload: Workload, curve: MissRatioCurve) -> str:
    """The conditions of a curve, as a title."""
    return (
        f"{workload.name}: {len(workload.requests):,} requests, one cache for all of them; {curve.distinct_tokens:,} distinct "
        f"tokens, {curve.sampled:.0%} of the blocks followed"
    )


def curve_rows(curve: MissRatioCurve, replayed: Mapping[int, float]) -> list[tuple[str, ...]]:
    """One row per size. `replayed`: the hit rates of full replays, by size."""
    rows: list[tuple[str, ...]] = []
    for point in curve.points:
        real = replayed.get(point.cache_tokens)
        beside = ("", "") if real is None else (f"{real:.1%}", f"{point.hit_rate - real:+.1%}")
        rows.append((f"{point.cache_tokens:,}", f"{point.hit_rate:.1%}", *beside))
    return rows


def curve_to_jsonable(workload: Workload, curve: MissRatioCurve, replayed: Mapping[int, float]) -> dict[str, Any]:
    """A curve and its conditions."""
    return {
        "kvatlas": own_version(),
        "workload": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "distinct_tokens": curve.distinct_tokens,
        "sampled": curve.sampled,
        "points": [
            {**point._asdict(), "replayed_hit_rate": replayed.get(point.cache_tokens)} for point in curve.points
        ],
    }


def swept_axis(points: Sequence[Point]) -> str | None:
    """The first field in which the points differ; None for a single point."""
    return next((name for name in _AXES if len({getattr(point, name) for point in points}) > 1), None)


def save_picture(study: Study, cells: Sequence[Cell], path: Path) -> None:
    """Plot bars by policy for one point, or lines over the swept axis for several, with other fields fixed at their first
    values.

    Raises InvalidValue for a file name whose suffix is not a picture format.
    """
    panels = {
        "hit_rate": ("prompt tokens found cached", "%", 100.0),
        "ttft_mean_ms": ("time to first token, mean", "ms", 1.0),
        "ttft_p99_ms": ("time to first token, p99", "ms", 1.0),
    }
    axis = swept_axis(study.points)
    with _figure(len(panels), (16, 4.8), path) as axes:
        _draw(study, cells, axes, axis, panels)


@contextmanager
def _figure(panels: int, inches: tuple[float, float], path: Path) -> Iterator[Sequence[Any]]:
    """Yield the axes of a figure, and save it afterwards."""
    import matplotlib as mpl  # not at the top: the import takes a second

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=inches, layout="constrained", squeeze=False)
    try:
        yield axes[0]
        figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    except ValueError as error:
        raise InvalidValue(
            f"--picture is {str(path)!r}: {str(error).partition('(')[0].strip()}; expected .png or .svg"
        ) from error
    finally:
        pyplot.close(figure)


def _draw(
    study: Study,
    cells: Sequence[Cell],
    axes: Sequence[Any],
    axis: str | None,
    panels: Mapping[str, tuple[str, str, float]],
) -> None:
    import matplotlib as mpl

    colours = [mpl.colormaps["tab20"](number) for number in range(20)]
    for panel, (name, (title, unit, factor)) in zip(axes, panels.items(), strict=True):
        for number, policy in enumerate(study.policies):
            mine = [cell for cell in cells if cell.summary.policy == policy]
            if axis is not None:
                first = study.points[0]
                mine = [cell for cell in mine if cell.point._replace(**{axis: getattr(first, axis)}) == first]
            values = [getattr(cell.summary.mean, name) * factor for cell in mine]
            margins = [getattr(cell.summary.margin, name) * factor for cell in mine]
            style = {"color": colours[number % len(colours)], "label": policy}
            if axis is None:
                panel.bar(number, values[0], yerr=margins[0], **style)
            else:
                places = [getattr(cell.point, axis) for cell in mine]
                panel.errorbar(places, values, yerr=margins, marker="o", capsize=3, **style)
        panel.set(title=title, ylabel=unit)
        if unit == "ms" and axis is not None:  # bars begin at 0
            panel.set_yscale("log")
        if axis is None:
            panel.set_xticks([])
        else:
            panel.set_xlabel(_AXES[axis])
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
