"""Measures every budget and prints a table: `python -m benchmarks`. `benchmarks.longer` has the longer measurements,
`benchmarks.peer` compares some figures with another system's."""

import os
import platform
from time import perf_counter

import uvloop
from rich.console import Console

from benchmarks import hashing, stalls
from benchmarks.index import digests, marks, memory, overlap
from benchmarks.peer.comparison import Subject
from benchmarks.peer.parts import PARTS
from benchmarks.rebuild import recovery
from benchmarks.result import Result, tabulate
from benchmarks.route import latency, throughput
from benchmarks.store_calls import store_calls
from benchmarks.stores import valkey_store
from benchmarks.stream import hybrids, ingest
from kvatlas.embedded import nats_server


async def _measure() -> list[Result]:
    results = hashing.measure()
    async with nats_server() as nats, valkey_store() as store:
        async with store_calls(store) as calls:
            results += await overlap.measure(store, 1)
            results += await overlap.measure(store, 4)
            results.append(await calls.result("overlap"))
        results += await marks.measure(store)
        results += await memory.measure(store)
        results += await digests.measure(store)
        results += await hybrids.measure(store)
        async with store_calls(store) as calls:
            results += await ingest.measure(store, nats.url)
            results.append(await calls.result("ingest"))
        async with store_calls(store) as calls:
            results += await latency.measure(store)
            results += await throughput.measure(store)
            results.append(await calls.result("route"))
        async with store_calls(store) as calls:
            results += await recovery.measure(store, nats.url)
            results.append(await calls.result("rebuild"))
        results += await stalls.measure(stalls.USUAL)
        for measure in PARTS.values():
            rows = await measure(store, [Subject.OURS])
            results += [row.result for row in rows if row.result is not None]
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
