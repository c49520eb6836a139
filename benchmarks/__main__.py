"""Measures every budget and prints a table: `python -m benchmarks`. `benchmarks.longer` measures what takes longer."""

import os
import platform
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks import hashing
from benchmarks.child_processes import indexer_process
from benchmarks.index import digests, memory, overlap
from benchmarks.rebuild import recovery
from benchmarks.result import Result, tabulate
from benchmarks.route import latency, throughput
from benchmarks.stores import valkey_store
from benchmarks.stream import ingest, visibility
from kvatlas.embedded import nats_server


async def _measure() -> list[Result]:
    results = hashing.measure()
    async with nats_server() as nats, valkey_store() as store:
        results += await overlap.measure(store, 1)
        results += await overlap.measure(store, 4)
        results += await memory.measure(store)
        results += await digests.measure(store)
        await store.client.flushall()
        async with indexer_process(nats.url, store.url):
            results += await visibility.measure(store, nats.url)
        results += await ingest.measure(store, nats.url)
        await store.client.flushall()
        results += await latency.measure(store)
        results += await throughput.measure(store)
        results += await recovery.measure(store, nats.url)
    return results


def main() -> None:
    began = perf_counter()
    results = uvloop.run(_measure())
    console = Console(width=130)
    console.print(tabulate(results, f"kvatlas on {os.cpu_count()} cores, {platform.machine()}"))
    missed = [result for result in results if result.met is False]
    console.print(f"{len(missed)} budgets not met; took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
