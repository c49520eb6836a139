"""`python -m benchmarks.peer [--ours] [PART,...]`: prints the figures of both (without a list, of all parts). `--ours`:
kvatlas alone; the peer need not be installed."""

import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from time import perf_counter

from rich.console import Console

from benchmarks.peer.comparison import Subject, tabulate
from benchmarks.peer.dynamo.processes import PYTHON
from benchmarks.peer.parts import PARTS
from benchmarks.stores import valkey_store


async def _measure(parts: Sequence[str], subjects: Sequence[Subject], console: Console) -> None:
    """Print each part as soon as it is measured."""
    for part in parts:
        async with valkey_store() as store:
            rows = await PARTS[part](store, subjects)
        console.print(
            tabulate(rows, f"{part}: {' beside '.join(subjects)}, {os.cpu_count()} cores, {platform.machine()}")
        )


def main(words: list[str]) -> None:
    """Run the comparison. `words`: the command line."""
    subjects = [Subject.OURS] if "--ours" in words else list(Subject)
    parts = [part for word in words if word != "--ours" for part in word.split(",") if part] or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        sys.exit(f"unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if Subject.THEIRS in subjects and not PYTHON.exists():
        sys.exit(f"{PYTHON} is missing; run `make bench-peer`, which installs the peer")
    began = perf_counter()
    console = Console(width=140)
    asyncio.run(_measure(parts, subjects, console))
    console.print(f"took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
