"""`python -m benchmarks.peer [PART,...]`: prints what is measured of both; all parts without a list."""

import asyncio
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter

from rich.console import Console

from benchmarks.peer import choices, ingest, memory, overlap, visibility
from benchmarks.peer.comparison import Comparison, tabulate
from benchmarks.peer.dynamo_process import PYTHON
from benchmarks.stores import valkey_store
from kvatlas.store.connection import Store

PARTS: dict[str, Callable[[Store], Awaitable[list[Comparison]]]] = {
    "choices": choices.measure,
    "overlap": overlap.measure,
    "ingest": ingest.measure,
    "visibility": visibility.measure,
    "memory": memory.measure,
}


async def _measure(parts: list[str], console: Console) -> None:
    """Prints each part when it is measured."""
    where = f"{os.cpu_count()} cores, {platform.machine()}"
    for part in parts:
        async with valkey_store() as store:
            console.print(tabulate(await PARTS[part](store), f"{part}: kvatlas beside Dynamo, {where}"))


def main(words: list[str]) -> None:
    """`words`: the parts, separated by commas."""
    parts = [part for word in words for part in word.split(",") if part] or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        sys.exit(f"unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is missing; run `make bench-peer`, which installs the peer")
    began = perf_counter()
    console = Console(width=140)
    asyncio.run(_measure(parts, console))
    console.print(f"took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
