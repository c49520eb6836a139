"""Measured figures with their budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `budget`: None to show it without a verdict. `at_least`: true if a higher figure is better."""

    name: str
    figure: float
    unit: str
    budget: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.budget is None:
            return None
        return self.figure >= self.budget if self.at_least else self.figure <= self.budget


def tabulate(results: Sequence[Result], title: str) -> Table:
    """One row per figure, with its budget and whether it is met."""
    table = Table("measured", "figure", "budget", "", title=title)
    for result in results:
        digits = 0 if result.figure >= 1_000 else 2
        limit = "" if result.budget is None else f"{'>=' if result.at_least else '<='} {result.budget:,.6g}"
        verdict = {None: "", True: "met", False: "NOT MET"}[result.met]
        table.add_row(result.name, f"{result.figure:,.{digits}f} {result.unit}", limit, verdict)
    return table
