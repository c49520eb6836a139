"""The residency index of one process, kept in a file: for a router that starts warm after a restart, without a server."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvatlas.blocks.residency import IndexWork
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope, scope_from_canonical, shard_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult, ScrubResult
from kvatlas.index.sqlite.changes import TrackedDict, keep_on_error
from kvatlas.index.sqlite.file import Changes, IndexFile
from kvatlas.index.sqlite.shard import SqliteShard
from kvatlas.runtime.threads import finish_in_thread


@asynccontextmanager
async def open_sqlite_index(
    path: Path | str, *, partitions: int | None = None, shards: int | None = None
) -> AsyncIterator["SqliteIndex"]:
    """`async with open_sqlite_index(path) as index`: the content of the file, or an empty index.

    Partitions and shards are those of the file, or else 64 and 1. Raises UnsuitableStore for a file that is not ours, is
    damaged, or is open in another process, and LayoutMismatch for a different version or for different partitions and shards.
    """
    file = await finish_in_thread(IndexFile, Path(path), partitions, shards)
    try:
        yield await finish_in_thread(SqliteIndex, file)
    finally:
        await finish_in_thread(file.close)


class SqliteIndex(MemoryIndex):
    """A ResidencyIndex that answers from memory and writes every change to a file; see the protocol for its promises.

    A call that changes something returns once the change is in the file. Calls that wait for the file share transactions.
    Raises Unreachable if the file can't be written to. In that case, answers from memory already include the change, and it is
    written together with the next one.
    """

    name = "sqlite"
    persistent = True

    def __init__(self, file: IndexFile, *, side_index: bool = True) -> None:
        """Reads the whole file; `open_sqlite_index` does this in a thread. Raises DamagedFile."""
        super().__init__(file.partitions, file.shards, side_index=side_index)
        self._file = file
        self._writing = asyncio.Lock()
        self._make_shards()
        self._tracked_scopes.update(
            {scope_id: file.read("scope", scope_from_canonical, text) for scope_id, text in file.rows("scopes")}
        )
        for shard in self._tracked_shards:
            shard.load(file)

    def _make_shards(self) -> None:
        self._tracked_shards = [SqliteShard(number, side_index=self._side_index) for number in range(self.shards)]
        self._tracked_scopes: TrackedDict[bytes, Scope] = TrackedDict()
        self._shards, self._scopes = list(self._tracked_shards), self._tracked_scopes

    # ------------------------------------------------------------ changes

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        result = await super().apply(shard, batches)
        await self._save(shard, [record.worker_id for record in result.records])
        return result

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        changed = await super().retire(worker_id, incarnation)
        await self._save(self._shard_number(worker_id), [worker_id])
        return changed

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        changed = await super().forget(worker_id, incarnation)
        await self._save(self._shard_number(worker_id), [worker_id])
        return changed

    async def forget_scopes(self, idle_s: float) -> int:
        forgotten = await super().forget_scopes(idle_s)
        await self._save_all()
        return forgotten

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        left = await super().sweep(shard, budget_blocks)
        await self._save(shard)
        return left

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        result = await super().scrub(shard, budget_blocks, partitions)
        await self._save(shard, result.damaged)
        return result

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        stored = await super().set_position(partition, expected, new)
        if stored == new:
            shard = shard_of(partition, self.shards)
            workers = self._tracked_shards[shard].workers if expected is not None else {}
            await self._save(shard, [one for one, record in workers.items() if record.partition == partition])
        return stored

    async def clear(self) -> None:
        async with self._writing:
            await finish_in_thread(self._file.clear)
            before = self._shards
            self._make_shards()
            self._keep_counts(before)

    @property
    def work(self) -> IndexWork:
        return replace(super().work, bytes_written=self._file.bytes_written)

    # ------------------------------------------------------------ the file

    async def _save(self, shard: int, workers: Iterable[str] = ()) -> None:
        self._tracked_shards[shard].changed_workers.update(dict.fromkeys(workers))
        await self._write_changes([self._tracked_shards[shard]])

    async def _save_all(self) -> None:
        for shard in self._tracked_shards:
            shard.changed_workers.update(dict.fromkeys(shard.workers))
        await self._write_changes(self._tracked_shards)

    async def _write_changes(self, shards: Sequence[SqliteShard]) -> None:
        """Write everything that has changed. Nothing is left to write if an earlier transaction included it."""
        async with self._writing:
            await self._write_changes_alone(shards)

    async def _write_changes_alone(self, shards: Sequence[SqliteShard]) -> None:
        """Write the changes. To be called only by the caller that has set `_writing`."""
        tracked = [self._tracked_scopes.changed, *(one for shard in shards for one in shard.changed)]
        with keep_on_error(tracked):
            changes = Changes()
            for scope_id in self._tracked_scopes.changed:
                scope = self._scopes.get(scope_id)
                changes.put("scopes", (scope_id,), None if scope is None else (scope.canonical,))
            for shard in shards:
                shard.describe(changes)
            for one in tracked:
                one.clear()
            if changes:
                await finish_in_thread(self._file.write, changes)
        for shard in shards:
            shard.confirm()

    async def _pin(self, worker_id: str, scope_id: bytes, tier: Tier, hashes: bytes, *, pinned: bool) -> None:
        await super()._pin(worker_id, scope_id, tier, hashes, pinned=pinned)
        await self._save(self._shard_number(worker_id))

    def _shard_number(self, worker_id: str) -> int:
        return shard_of(partition_of(worker_id, self.partitions), self.shards)
