"""CPU time per block, by number of hashes per message: `python -m benchmarks.stream.message_sizes`.

The same blocks go from a publisher process through NATS (file storage) and an indexer process to the store, in messages of each
size. The sizes take turns; each process' time is measured from the first message until the last one is applied.
"""

from collections.abc import Sequence
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.child_processes import indexer_process
from benchmarks.process_usage import usage_of
from benchmarks.stores import store_cpu_s, valkey_store
from benchmarks.stream.ingest import measure_rate, prepare_index
from benchmarks.stream.synthetic_publisher import publisher_process, worker_names
from kvatlas.embedded import nats_server
from kvatlas.embedded.async_servers import EmbeddedServer
from kvatlas.store.connection import Store

SIZES = (16, 64, 256, 4_096)
BLOCKS = 524_288
ROUNDS = 5
PARTS = ("publisher", "NATS", "indexer", "store")


async def measure_turn(store: Store, nats: EmbeddedServer, hashes_a_message: int) -> list[float]:
    """CPU time of each of PARTS, in microseconds per block."""
    messages = BLOCKS // hashes_a_message
    index = await prepare_index(store, nats.url)
    async with (
        indexer_process(nats.url, store.url) as indexer,
        publisher_process(nats.url, hashes_a_message, messages) as publisher,
    ):

        async def used() -> list[float]:
            return [usage_of(nats.pid).cpu_s, usage_of(indexer.pid).cpu_s, await store_cpu_s(store)]

        before = await used()
        await publisher.start()
        await measure_rate(index, worker_names(hashes_a_message), messages, count_from_first=False)
        after = await used()
        [published] = await publisher.results()
    seconds = [float(published), *(end - begin for begin, end in zip(before, after, strict=True))]
    return [one / BLOCKS * 1e6 for one in seconds]


async def measure() -> dict[int, list[list[float]]]:
    """Each round's figures by size."""
    found: dict[int, list[list[float]]] = {size: [] for size in SIZES}
    async with nats_server() as nats, valkey_store() as store:
        for turn in range(ROUNDS):
            for size in SIZES if turn % 2 == 0 else SIZES[::-1]:
                found[size].append(await measure_turn(store, nats, size))
    return found


def tabulate(found: dict[int, list[list[float]]]) -> Table:
    table = Table(
        "hashes per message",
        *PARTS,
        "together",
        title=f"microseconds a block: median of {ROUNDS} rounds (least to most), {BLOCKS:,} blocks each",
    )
    for size, rounds in found.items():
        columns = [*zip(*rounds, strict=True), [sum(one) for one in rounds]]
        table.add_row(f"{size:,}", *map(_cell, columns))
    return table


def _cell(figures: Sequence[float]) -> str:
    return f"{median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def main() -> None:
    Console(width=140).print(tabulate(uvloop.run(measure())))


if __name__ == "__main__":
    main()
