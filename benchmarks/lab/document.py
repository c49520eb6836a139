"""docs/results.md: chapters that are measured separately, each with the command that repeats it."""

import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvatlas.version import own_version

RESULTS = Path("docs/results.md")
CHAPTERS = ("grid", "terms", "events")
"""The chapters, in order."""

HEAD = """# Routing policies compared
Written by `make lab`; don't edit. Conclusions: [replay](replay.md).

Requests are replayed against simulated engines in virtual time, with kvatlas' real ledger, index, cost model and reservations
([how](replay.md)). The engines' step costs are those of a 70-billion-parameter model on four accelerators
(`benchmarks/lab/grid.py` derives them); for late and lost events, roughly those of an 8-billion-parameter model on one. None
was measured on a real accelerator. `kvatlas replay --help` explains the policies.
"""
_MARK = re.compile(r"^<!-- chapter: (\w+) -->\n", re.MULTILINE)


class Stopwatch:
    """Measures, from its creation on, elapsed time, and the CPU time of this process and its finished children."""

    def __init__(self) -> None:
        self._began_s, self._began_cpu_s = time.monotonic(), _processor_s()

    def __str__(self) -> str:
        elapsed_s, cpu_s = time.monotonic() - self._began_s, _processor_s() - self._began_cpu_s
        return f"{elapsed_s / 60:.1f} minutes, {cpu_s / 60:.1f} of CPU time"


def _processor_s() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def write_chapter(name: str, text: str, watch: Stopwatch, path: Path = RESULTS) -> None:
    """Replace one chapter of the document, with a line on how it was measured; the others stay."""
    written = path.read_text() if path.exists() else ""
    parts = _MARK.split(written)[1:]
    chapters = dict(zip(parts[::2], parts[1::2], strict=True))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    chapters[name] = f"{text.rstrip()}\n\nkvatlas {own_version()}, commit {_commit()}; {machine}; {watch}.\n\n"
    marked = (f"<!-- chapter: {one} -->\n{chapters[one]}" for one in CHAPTERS if one in chapters)
    path.write_text(f"{HEAD}\n{''.join(marked)}".rstrip() + "\n")


def _commit() -> str:
    """The commit that the working tree is at."""
    described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def to_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(columns), f"|{'---|' * len(columns)}", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
