"""Start-up time of the command (its help), and of the imports of a router and of an embedded publisher."""

import asyncio
import os
import sys
from collections.abc import Sequence
from time import perf_counter

from benchmarks.peer.comparison import Comparison, Subject
from benchmarks.peer.dynamo.processes import PYTHON, QUIET
from kvatlas.store.connection import Store

RUNS = 7
COMMANDS: Sequence[tuple[str, dict[Subject, Sequence[str]], float | None]] = (
    ("Python alone", {Subject.OURS: ["-c", "pass"], Subject.THEIRS: ["-c", "pass"]}, None),
    ("kvatlas --help", {Subject.OURS: ["-m", "kvatlas_cli.main", "--help"]}, 0.2),
    (
        "import of a router's client",
        {Subject.OURS: ["-c", "import router_client"], Subject.THEIRS: ["-c", "import dynamo.llm"]},
        0.15,
    ),
    ("import of an embedded publisher", {Subject.OURS: ["-c", "import publishers.publisher"]}, None),
)
"""(what, the Python command of each, budget in seconds); each includes the start of Python."""


async def measure(_: Store, subjects: Sequence[Subject], rounds: int = RUNS) -> list[Comparison]:
    rows = []
    for name, commands, budget_s in COMMANDS:
        figures: dict[Subject, list[float]] = {subject: [] for subject in subjects if subject in commands}
        for _round in range(rounds):
            for subject, times in figures.items():
                times.append(await _time(subject, commands[subject]))
        rows.append(Comparison(name, "s", figures, budget_s))
    return rows


async def _time(subject: Subject, args: Sequence[str]) -> float:
    """Seconds from start to exit. Raises RuntimeError if the command fails."""
    python = sys.executable if subject is Subject.OURS else str(PYTHON)
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(
        python, *args, stdout=asyncio.subprocess.DEVNULL, env={**os.environ, **QUIET}
    )
    if await process.wait():
        raise RuntimeError(f"{python} {' '.join(args)} exited with {process.returncode}")
    return perf_counter() - began
