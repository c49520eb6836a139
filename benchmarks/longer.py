"""Longer measurements than those of the budgets: `python -m benchmarks.longer`.

They show how `route` scales, how well several routers spread a burst compared with one, the proxy's overhead, the
accuracy of predictions and of learned rates, and how long rebuilds of a wiped index take.
"""

import os
import platform
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks import learning, predictions
from benchmarks.proxy import overhead
from benchmarks.rebuild import recovery
from benchmarks.result import tabulate
from benchmarks.route import growth
from benchmarks.spread import comparison
from benchmarks.stores import valkey_store
from kvatlas.embedded import nats_server


async def _measure(console: Console) -> None:
    """Print each part as soon as it is measured."""
    async with nats_server() as nats, valkey_store() as store:
        console.print(*await growth.measure(store))
        runs = await comparison.measure(store)
        console.print(comparison.tabulate(runs))
        console.print(overhead.tabulate(await overhead.measure(store)))
        rebuilds = await recovery.measure(store, nats.url, rounds=recovery.ROUNDS)
    accuracies = await predictions.measure()
    console.print(predictions.tabulate(accuracies))
    rates = await learning.measure()
    console.print(learning.tabulate(rates))
    results = [
        *comparison.to_results(runs),
        *predictions.to_results(accuracies),
        *learning.to_results(rates),
        *rebuilds,
    ]
    console.print(tabulate(results, f"kvatlas on {os.cpu_count()} cores, {platform.machine()}"))


def main() -> None:
    began = perf_counter()
    console = Console(width=140)
    uvloop.run(_measure(console))
    console.print(f"took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
