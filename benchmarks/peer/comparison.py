"""Figures of two subjects side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of both, from each turn. Empty: that one has nothing like it."""

    name: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratio(self) -> float | None:
        """Ours divided by theirs: the median over the turns."""
        if not self.ours or not self.theirs:
            return None
        return median(ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True))


def tabulate(comparisons: Sequence[Comparison], title: str) -> Table:
    """One row a figure: ours, theirs, ratio."""
    table = Table("measured", "unit", title=title)
    for column in ("ours", "theirs", "ours / theirs"):
        table.add_column(column, justify="right")
    for row in comparisons:
        ours, theirs = (_number(median(figures)) if figures else "-" for figures in (row.ours, row.theirs))
        table.add_row(row.name, row.unit, ours, theirs, "-" if row.ratio is None else f"{row.ratio:.2f}")
    return table


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
