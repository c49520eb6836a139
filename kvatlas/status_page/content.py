"""The content of a status page, independent of how it looks: facts, sections of tables, and a form for the probe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Tone(StrEnum):
    """What a cell means."""

    PLAIN = "plain"
    QUIET = "quiet"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Cell:
    """`hint`: details that are shown on hover. `share`: 0 to 1, drawn as a bar beside the text. `marked`: the text is a state
    or a choice, and stands out."""

    text: str
    tone: Tone = Tone.PLAIN
    hint: str = ""
    share: float | None = None
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """`number`: the cells of this column are compared by eye, so they are right-aligned."""

    label: str
    number: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`empty`: the text that is shown if there are no rows. `note`: what the table leaves out. `title`: used in a section with
    several tables. `folded`: the rows are shown after a click."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    empty: str = "none"
    note: str = ""
    title: str = ""
    folded: bool = False

    def without_empty(self, *labels: str) -> "Table":
        """Drop those of these columns that are empty in every row."""
        kept = [
            i
            for i, column in enumerate(self.columns)
            if column.label not in labels or any(row[i].text not in ("", "0", QUIET_DASH.text) for row in self.rows)
        ]
        return replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )


@dataclass(frozen=True, slots=True)
class Bars:
    """A row of bars, with the newest one last. `values`: (height, label) for each bar."""

    title: str
    values: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Section:
    """`name`: the section's anchor in the page. `lines`: paragraphs above the tables, each with its tone."""

    name: str
    title: str
    tables: Sequence[Table] = ()
    lines: Sequence[Cell] = ()
    bars: Bars | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the figures at the top of the page."""

    label: str
    value: Cell


QUIET_DASH = Cell("–", Tone.QUIET)


def milliseconds_text(us: float) -> str:
    """Milliseconds as text, with a decimal place if there are few."""
    return f"{us / 1e3:,.1f} ms" if us < 100_000 else f"{us / 1e3:,.0f} ms"


def number_cell(value: int, tone: Tone = Tone.PLAIN, hint: str = "") -> Cell:
    """A number with thousands separators; 0 is shown in a quiet tone."""
    return Cell(f"{value:,}", Tone.QUIET if not value and tone is Tone.PLAIN else tone, hint)
