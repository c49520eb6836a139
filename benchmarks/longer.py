"""What takes longer to measure than the budgets: `python -m benchmarks.longer`.

How `route` grows, how many routers decide like one, what the proxy adds, how often predictions are right, how near learned
rates come to the true ones, and the rebuild of a wiped index several times.
"""

import os
import platform
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks import learning, predictions, proxy, rebuild, route, spread
from benchmarks.result import show
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.store.connection import open_store


async def _measure(console: Console) -> None:
    """Prints each part as soon as it is there."""
    async with nats_server() as nats, valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            console.print(*await route.growth(store, valkey.url))
            rows = await spread.measure(store, valkey.url)
            console.print(spread.show(rows))
            console.print(proxy.show(await proxy.measure(store, valkey.url)))
            rebuilt = await rebuild.measure(store, nats.url, laps=rebuild.LAPS)
        finally:
            await store.close()
    compared = await predictions.measure()
    console.print(predictions.show(compared))
    learned = await learning.learned_rates()
    console.print(learning.show(learned))
    results = [*spread.results(rows), *(one.result for one in compared), *learning.results(learned), *rebuilt]
    console.print(show(results, f"kvatlas on {os.cpu_count()} cores, {platform.machine()}"))


def main() -> None:
    began = perf_counter()
    console = Console(width=140)
    uvloop.run(_measure(console))
    console.print(f"took {perf_counter() - began:.0f} s")


main()
