"""`python -m benchmarks.gateway`: prints the cost of the endpoint picker, and its decisions compared with `kvatlas router`."""

import uvloop
from rich.console import Console

from benchmarks.gateway import latency, workload
from benchmarks.stores import valkey_store


async def _main() -> None:
    async with valkey_store() as store:
        costs = await latency.measure(store)
    console = Console(width=130)
    console.print(latency.tabulate(costs))
    console.print(workload.tabulate(await workload.measure()))


if __name__ == "__main__":
    uvloop.run(_main())
