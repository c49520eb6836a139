"""Figures for `docs/scaling.md`: `python -m benchmarks.scaling [primaries] [fleet] [sidecars]`; without a name, all of
them."""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.scaling import fleet, primaries, sidecars

PARTS: Mapping[str, Callable[[], Awaitable[Sequence[Table]]]] = {
    "primaries": primaries.report,
    "fleet": fleet.report,
    "sidecars": sidecars.report,
}


async def _report(names: Sequence[str]) -> None:
    console = Console(width=170)
    for name in names:
        began = perf_counter()
        for table in await PARTS[name]():
            console.print(table)
        console.print(f"{name} took {perf_counter() - began:.0f} s")


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        print(f"no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
        sys.exit(2)
    uvloop.run(_report(names))


if __name__ == "__main__":
    main()
