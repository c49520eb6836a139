"""`python -m benchmarks.requests [routers] [queue]`: prints what clients see (without an argument, in both)."""

import sys

import uvloop
from rich.console import Console

from benchmarks.requests import queue, routers

PARTS = {"routers": routers, "queue": queue}


async def _main(names: list[str]) -> None:
    console = Console(width=150)
    for name in names:
        console.print(PARTS[name].tabulate(await PARTS[name].measure()))


if __name__ == "__main__":
    wrong = [name for name in sys.argv[1:] if name not in PARTS]
    if wrong:
        sys.exit(f"no part {', '.join(wrong)}; expected {', '.join(PARTS)}")
    uvloop.run(_main(sys.argv[1:] or list(PARTS)))
