"""Output of commands: JSON for scripts, human-readable tables, notices on stderr."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.quantities import age_text as age_text
from kvatlas.quantities import count_text as count_text
from kvatlas_cli.logs import notice_text, printable

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_WIDTH = 240
"""Width of tables for programs and files."""


def print_notice(line: str) -> None:
    """Print one line for the user on stderr, such as why a command waits."""
    print(notice_text(line), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """Print a JSON document on one line of stdout and flush it, for programs that read the output of a running
    command."""
    print(json.dumps(value), flush=True)


def line_width() -> int | None:
    """Maximum width of lines: the terminal's, or COLUMNS; None: unlimited."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def wrap(text: str, width: int, indent: str, further: str) -> list[str]:
    """Wrap a text; flags and addresses stay whole if they fit on a line. `further`: the indent of all lines after the
    first."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. If its lines don't fit, print each row as a paragraph that begins with its first cell."""
    width = line_width() or PLAIN_WIDTH
    rows = [[printable(cell) for cell in row] for row in rows]
    if rows and _table_width(columns, rows) > width:
        print(title)
        for row in rows:
            print("\n".join(_paragraph(columns, row, width)))
        return
    from rich.console import Console

    Console(width=width, highlight=False, markup=False).print(make_table(title, columns, rows))


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    """A table for rich's console, whose long cells are folded; any characters that a terminal would act on are
    escaped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _table_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The width, with a space on both sides of each cell, and lines between them."""
    cells = [max(len(column), *(len(row[at]) for row in rows)) for at, column in enumerate(columns)]
    return sum(cells) + 3 * len(cells) + 1


def _paragraph(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """The first cell, then the others, each after its column's name; such a pair stays on one line if it fits there."""
    lines, line = [row[0]], " "
    for column, cell in zip(columns[1:], row[1:], strict=True):
        pair = f" {column}: {cell}" if column else f" {cell}"
        if len(line) + len(pair) + 1 > width and line.strip():
            lines.append(line)
            line = " "
        line += pair + ("," if column is not columns[-1] else "")
        if len(line) > width:
            lines += wrap(line.strip(), width, "  ", "    ")
            line = " "
    return [*lines, line] if line.strip() else lines
