"""Compares the index backends on the same messages: `python -m benchmarks.index.backends [BLOCKS]`.

Workers store chains one after another, and remove some; a call carries several messages, like an indexer's. The store keeps an
append-only file, so it restarts with its data; the memory index is refilled by its publishers. Write amplification is the bytes
written to disk (SQLite: all that the process writes in the meantime; Valkey: its append-only file), divided by the bytes of the
changed block entries (hash and holders value).
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import anyio
from rich.console import Console
from rich.table import Table

from benchmarks.timing import quantile, time_async_calls
from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.bus.wire import RawMessage, to_raw
from kvatlas.embedded import EmbeddedServer
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.events import Message, Removed, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.sqlite.index import open_sqlite_index
from kvatlas.store.connection import Store, connected_store

BLOCKS = 200_000
WORKERS = 4
BLOCK_SIZE = 16
HASHES_A_MESSAGE = 64
MESSAGES_A_CALL = 32
PROMPT_BLOCKS = 512
CALLS = 300
USE = ScopeUse(Scope("bench", "bench"), BLOCK_SIZE, 1 << 20)


@dataclass(slots=True)
class Workload:
    """Each worker's messages; all workers hold the first chain."""

    chains: list[bytes]
    messages: dict[str, list[RawMessage]] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: int) -> "Workload":
        chains = [_chain(number) for number in range(max(1, blocks // WORKERS // PROMPT_BLOCKS))]
        workload = cls(chains)
        for number in range(WORKERS):
            workload.messages[f"worker-{number}"] = workload._of_worker(f"worker-{number}")
        return workload

    def _of_worker(self, worker_id: str) -> list[RawMessage]:
        scope_id, part_bytes = USE.scope.scope_id, HASHES_A_MESSAGE * HASH_BYTES
        changes: list[Stored | Removed] = []
        for number, chain in enumerate(self.chains):
            for at in range(0, len(chain), part_bytes):
                before = chain[at - HASH_BYTES : at] or None
                changes.append(Stored(scope_id, Tier.HBM, chain[at : at + part_bytes], before, at // HASH_BYTES))
            if number % 4 == 3:
                changes.append(Removed(scope_id, Tier.HBM, chain[-part_bytes:]))
        begin = Message(worker_id, 1, 0, [SnapshotBegin(), SnapshotEnd(0, Digest().words)], {}, 1)
        uses = {scope_id: USE}
        return [to_raw(begin)] + [
            to_raw(Message(worker_id, 1, seq, [change], uses, 1)) for seq, change in enumerate(changes, 1)
        ]

    async def apply(self, index: ResidencyIndex) -> None:
        for worker_id, messages in self.messages.items():
            partition = partition_of(worker_id, index.partitions)
            for at in range(0, len(messages), MESSAGES_A_CALL):
                await index.apply(0, [PartitionBatch(partition, messages[at : at + MESSAGES_A_CALL])])


@dataclass(slots=True)
class Figures:
    """Measurements of one backend. `children_us`: None if it has no side index. `recovery_s`: from reopening it to the first
    answer."""

    name: str
    blocks_s: float
    entry_bytes: int
    overlap_us: float
    children_us: float | None
    written_bytes: int = 0
    kept_bytes: int = 0
    recovery_s: float = 0.0


async def measure_memory(workload: Workload) -> Figures:
    """Measure the memory index. It keeps nothing on disk, so its publishers refill it."""
    figures = await _measure(MemoryIndex(), workload)
    began, again = perf_counter(), MemoryIndex()
    await workload.apply(again)
    figures.recovery_s = await _answer(again, workload, began)
    return figures


async def measure_sqlite(workload: Workload, folder: Path) -> Figures:
    path, before = folder / "index", _written_by_this_process()
    async with open_sqlite_index(path) as index:
        figures = await _measure(index, workload)
    figures.written_bytes = _written_by_this_process() - before
    figures.kept_bytes = path.stat().st_size
    began = perf_counter()
    async with open_sqlite_index(path) as again:
        figures.recovery_s = await _answer(again, workload, began)
    return figures


async def measure_redis(workload: Workload, folder: Path, *, side_index: bool) -> Figures:
    async with EmbeddedServer(ValkeyProcess(data_dir=folder, appendonly=True)) as server:
        async with connected_store(server.url, wait=False) as store:
            before = await _used_bytes(store)
            index = await open_redis_index(store, writer=True, side_index=side_index)
            figures = await _measure(index, workload, children=side_index)
            figures.name += " with side index" if side_index else ""
            figures.kept_bytes = await _used_bytes(store) - before
            figures.written_bytes = (await store.client.info("persistence"))["aof_current_size"]
        await server.stop()
        began = perf_counter()
        await server.start()
        async with connected_store(server.url, wait=False) as store:
            figures.recovery_s = await _answer(await open_redis_index(store, writer=False), workload, began)
    return figures


async def _measure(index: ResidencyIndex, workload: Workload, *, children: bool = True) -> Figures:
    began = perf_counter()
    await workload.apply(index)
    seconds = perf_counter() - began
    work = index.work
    chain = workload.chains[0]
    middle = unpack_hashes(chain)[PROMPT_BLOCKS // 2]
    overlaps = await time_async_calls([partial(index.overlap, USE.scope, chain)] * CALLS)
    scans = await time_async_calls([partial(index.children, USE.scope, middle)] * CALLS) if children else []
    return Figures(
        index.name,
        (work.puts + work.removes) / seconds,
        work.bytes_written,
        quantile(overlaps, 0.5) * 1e6,
        quantile(scans, 0.5) * 1e6 if scans else None,
    )


async def _answer(index: ResidencyIndex, workload: Workload, began: float) -> float:
    found = await index.overlap(USE.scope, workload.chains[0])
    if set(found.depths()) != set(workload.messages):
        raise SystemExit(f"{index.name}: after opening it again, workers {sorted(found.depths())} hold the first chain")
    return perf_counter() - began


def _chain(number: int) -> bytes:
    first = number * PROMPT_BLOCKS * BLOCK_SIZE
    return extend_chain(range(first, first + PROMPT_BLOCKS * BLOCK_SIZE), BLOCK_SIZE)


def _written_by_this_process() -> int:
    """Bytes that this process has passed to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


async def _used_bytes(store: Store) -> int:
    return int((await store.client.info("memory"))["used_memory"])


async def measure_all(blocks: int) -> list[Figures]:
    workload = Workload.of(blocks)
    figures = [await measure_memory(workload)]
    with tempfile.TemporaryDirectory() as folder:
        figures.append(await measure_sqlite(workload, Path(folder)))
    for side_index in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            figures.append(await measure_redis(workload, Path(folder), side_index=side_index))
    return figures


def tabulate(all_figures: Sequence[Figures], blocks: int) -> Table:
    table = Table(
        *("backend", "changes/s", "entries written", "to disk", "amplification", "kept, a residency"),
        *("overlap p50", "children p50", "open again"),
        title=f"{blocks:,} residencies of {WORKERS} workers",
    )
    for one in all_figures:
        table.add_row(
            one.name,
            f"{one.blocks_s:,.0f}",
            f"{one.entry_bytes / 1e6:.1f} MB",
            f"{one.written_bytes / 1e6:.1f} MB" if one.written_bytes else "nothing",
            f"{one.written_bytes / one.entry_bytes:.1f}" if one.written_bytes else "-",
            f"{one.kept_bytes / blocks:.0f} bytes" if one.kept_bytes else "-",
            f"{one.overlap_us:,.0f} us",
            f"{one.children_us:,.0f} us" if one.children_us is not None else "-",
            f"{one.recovery_s:.2f} s",
        )
    return table


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    Console(width=150).print(tabulate(anyio.run(measure_all, blocks), blocks))


if __name__ == "__main__":
    main()
