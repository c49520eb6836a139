"""`python -m benchmarks.spread`: prints how evenly several routers spread a burst of requests, compared with one."""

import uvloop
from rich.console import Console

from benchmarks.spread import comparison
from benchmarks.stores import valkey_store


async def _main() -> None:
    async with valkey_store() as store:
        runs = await comparison.measure(store)
    Console(width=140).print(comparison.tabulate(runs))


if __name__ == "__main__":
    uvloop.run(_main())
