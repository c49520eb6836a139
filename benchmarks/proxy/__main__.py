"""`python -m benchmarks.proxy`: prints the overhead that `kvatlas router` adds to a request."""

import uvloop
from rich.console import Console

from benchmarks.proxy import overhead
from benchmarks.stores import valkey_store


async def _main() -> None:
    async with valkey_store() as store:
        found = await overhead.measure(store)
    Console(width=130).print(overhead.tabulate(found))


if __name__ == "__main__":
    uvloop.run(_main())
