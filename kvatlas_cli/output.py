"""What commands print: JSON for scripts, tables for people, notices on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_notice(line: str) -> None:
    """Print one line for the user on stderr, such as why a command waits."""
    print(f"kvatlas: {line}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line of stdout and flush it, for a reader of a running command."""
    print(json.dumps(value), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as wide as the terminal; 240 columns if stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False).print(table)


def count_text(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def age_text(age_us: int) -> str:
    """A duration as people read it."""
    seconds = age_us / 1e6
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
