"""Figures of kvatlas and its peer side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from rich.table import Table

from benchmarks.result import Result


class Subject(StrEnum):
    """The measured systems."""

    OURS = "ours"
    THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure from each turn of each subject. A subject that was not measured, or has no such figure, is missing.

    `budget`: upper limit of ours."""

    name: str
    unit: str
    figures: Mapping[Subject, Sequence[float]]
    budget: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours divided by theirs: the median over the turns."""
        ours, theirs = self.figures.get(Subject.OURS), self.figures.get(Subject.THEIRS)
        return median(map(_divide, ours, theirs)) if ours and theirs else None

    @property
    def result(self) -> Result | None:
        """Our figure with its budget."""
        ours = self.figures.get(Subject.OURS)
        return Result(self.name, median(ours), self.unit, self.budget) if ours else None


def tabulate(comparisons: Sequence[Comparison], title: str) -> Table:
    """One row per figure: ours, theirs, ratio."""
    table = Table("measured", "unit", title=title)
    for column in (*Subject, "ours / theirs"):
        table.add_column(column, justify="right")
    for row in comparisons:
        cells = [_number(median(row.figures[subject])) if row.figures.get(subject) else "-" for subject in Subject]
        table.add_row(row.name, row.unit, *cells, "-" if row.ratio is None else f"{row.ratio:.2f}")
    return table


def _divide(ours: float, theirs: float) -> float:
    return ours / theirs


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
