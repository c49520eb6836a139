"""Measures every budget and prints a table: `python -m benchmarks`. `benchmarks.longer` has what takes longer."""

import os
import platform
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks import digests, hashing, ingest, memory, overlap, rebuild, route, visible
from benchmarks.children import indexer_process
from benchmarks.result import Result, show
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.store.connection import open_store


async def _measure() -> list[Result]:
    results = hashing.measure()
    async with nats_server() as nats, valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            results += await overlap.measure(store, 1)
            results += await overlap.measure(store, 4)
            results += await memory.measure(store)
            results += await digests.measure(store)
            await store.client.flushall()
            async with indexer_process(nats.url, valkey.url):
                results += await visible.measure(store, nats.url)
            results += await ingest.measure(store, nats.url)
            await store.client.flushall()
            results += await route.measure(store, valkey.url)
            results += await rebuild.measure(store, nats.url)
        finally:
            await store.close()
    return results


def main() -> None:
    began = perf_counter()
    results = uvloop.run(_measure())
    console = Console(width=130)
    console.print(show(results, f"kvatlas on {os.cpu_count()} cores, {platform.machine()}"))
    missed = [result for result in results if result.met is False]
    console.print(f"{len(missed)} budgets not met; took {perf_counter() - began:.0f} s")


main()
