"""`python -m benchmarks.route`: prints the latency of `route`, how it scales, and its throughput."""

import uvloop
from rich.console import Console

from benchmarks.result import tabulate
from benchmarks.route import growth, latency, shapes, throughput
from benchmarks.stores import valkey_store


async def _main() -> None:
    async with valkey_store() as store:
        results = [*await latency.measure(store), *await throughput.measure(store)]
        tables = [*await growth.measure(store), await shapes.measure(store)]
    Console(width=130).print(tabulate(results, "route"), *tables)


if __name__ == "__main__":
    uvloop.run(_main())
