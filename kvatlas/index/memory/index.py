"""The residency index in the memory of a process: the reference model, and the index of a router that does not share one."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from time import monotonic

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import (
    IndexMetrics,
    IndexWork,
    Overlap,
    Residency,
    ResidentBlocks,
    ResidentCount,
    residency_order,
)
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.bus.wire import SCOPES, scope_use
from kvatlas.errors import NotSupported
from kvatlas.identity import Scope, shard_of
from kvatlas.index.direct_writes import DirectWrites
from kvatlas.index.gallop import STRIDE, differences
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.mark_lookup import check_reach
from kvatlas.index.memory.block_table import BlockTable, split
from kvatlas.index.memory.shard import MemoryShard
from kvatlas.index.protocol import (
    DEFAULT_PARTITIONS,
    DEFAULT_SHARDS,
    ApplyResult,
    Room,
    ScrubResult,
    WorkerRecord,
)
from kvatlas.index.usage import ResidentUse, sum_use


class MemoryIndex(DirectWrites):
    """A ResidencyIndex in this process; see the protocol for its promises."""

    name = "memory"
    persistent = False

    def __init__(
        self,
        partitions: int = DEFAULT_PARTITIONS,
        shards: int = DEFAULT_SHARDS,
        *,
        side_index: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`clock`: a clock in seconds, for `usage`."""
        self.partitions = partitions
        self.shards = shards
        self._side_index = side_index
        self._clock = clock
        self._shards = [MemoryShard(side_index=side_index, clock=clock) for _ in range(shards)]
        self._scopes: dict[bytes, Scope] = {}
        self._used_scopes: dict[bytes, Scope] = {}
        """Forgotten scopes."""
        self._prefix_scans = 0

    def shard_at(self, shard: int) -> MemoryShard:
        """The state of one shard, for callers that fill or read it directly, without messages."""
        return self._shards[shard]

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        for batch in batches:
            for raw in batch.messages:
                for scope_id, entry in raw[SCOPES].items():
                    if scope_id not in self._scopes:
                        self._scopes[scope_id] = scope_use(scope_id, entry).scope
        return self._shards[shard].apply(batches)

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        return self._shard_of(worker_id).retire(worker_id, incarnation)

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        return self._shard_of(worker_id).forget(worker_id, incarnation)

    async def forget_scopes(self, idle_s: float) -> int:
        held = {scope_id for shard in self._shards for scope_id in shard.table.forget_empty_scopes()}
        unheld = [scope_id for scope_id in self._scopes if scope_id not in held]
        for scope_id in unheld:
            self._used_scopes[scope_id] = self._scopes.pop(scope_id)
        return len(unheld)

    async def clear(self) -> None:
        before = self._shards
        self._shards = [MemoryShard(side_index=self._side_index, clock=self._clock) for _ in range(self.shards)]
        self._keep_counts(before)

    def _keep_counts(self, before: Sequence[MemoryShard]) -> None:
        """Keep the counters of the work that was done before a clear."""
        for shard, cleared in zip(self._shards, before, strict=True):
            shard.counts = cleared.counts

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        return self._shards[shard].table.sweep(budget_blocks)

    async def room(self, shard: int) -> Room:
        return Room(0, 0, False)

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        return self._shards[shard].scrub(partitions)

    def overlap_now(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, stride: int = STRIDE
    ) -> Overlap:
        """`overlap` without a task switch, for callers in the same process."""
        self._prefix_scans += 1
        scope_id = scope.scope_id
        first, most = check_reach(first_index, limit)
        shards = [
            shard.table.overlap(scope_id, hashes, stride, first_index=first, limit=most) for shard in self._shards
        ]
        return Overlap(shards, len(hashes) // HASH_BYTES)

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        found = self.overlap_now(scope, hashes, first_index=first_index, limit=limit)
        if not verify:
            return found
        walked = self.overlap_now(scope, hashes, first_index=first_index, limit=limit, stride=0)
        self._prefix_scans -= 1
        return Overlap(found.shards, found.looked_up, differences(found, walked))

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        key = sequence_hash.to_bytes(HASH_BYTES, "little")
        found = [r for shard in self._shards for r in _residencies(shard.table, scope, key)]
        return sorted(found, key=residency_order)

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        if not self._side_index:
            raise NotSupported(
                "can't list the children of a prefix: this memory index was created without a side index"
            )
        self._prefix_scans += 1
        parent = prefix_hash.to_bytes(HASH_BYTES, "little") if prefix_hash is not None else b""
        found = [
            residency
            for shard in self._shards
            for key in shard.table.children.get(scope.scope_id, {}).get(parent, ())
            for residency in _residencies(shard.table, scope, key)
        ]
        return sorted(found, key=residency_order)

    async def record(self, worker_id: str) -> WorkerRecord | None:
        shard = self._shard_of(worker_id)
        return shard.record(worker_id) if worker_id in shard.workers else None

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        return [self._shards[shard].record(worker_id) for worker_id in self._shards[shard].workers]

    async def position(self, partition: int) -> Position | None:
        return self._shards[shard_of(partition, self.shards)].positions.get(partition)

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        return self._shards[shard_of(partition, self.shards)].set_position(partition, expected, new)

    async def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        for shard in self._shards:
            for scope_id, blocks in shard.table.blocks.items():
                for key in list(blocks):
                    for residency in _residencies(shard.table, self._scopes[scope_id], key):
                        if worker_id in (None, residency.worker_id):
                            yield residency

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        shard = self._shard_of(worker_id)
        record = shard.workers.get(worker_id)
        return shard.digest_words(record.active) if record is not None and record.active >= 0 else None

    async def claimed(self, worker_ids: Sequence[str]) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for worker_id in worker_ids:
            shard = self._shard_of(worker_id)
            record = shard.workers.get(worker_id)
            if record is not None and (holders := [one for one in (record.active, record.loading) if one >= 0]):
                found[worker_id] = max(shard.table.holders[holder].digest.blocks for holder in holders)
        return found

    async def length(self) -> int:
        tables = [shard.table for shard in self._shards]
        return sum(table.holders[holder].digest.blocks for table in tables for holder in table.active)

    async def metrics(self) -> IndexMetrics:
        return self._count_resident().by_model(self._scopes)

    @property
    def work(self) -> IndexWork:
        counts = [shard.counts for shard in self._shards]
        return IndexWork(
            puts=sum(count.stored for count in counts),
            removes=sum(count.removed for count in counts),
            prefix_scans=self._prefix_scans,
            bytes_written=0,
        )

    async def resident_blocks(self) -> Sequence[ResidentBlocks]:
        return self._count_resident().by_scope(self._scopes)

    async def usage(self) -> Sequence[ResidentUse]:
        amounts = [one for shard in self._shards for one in shard.table.usage()]
        return sum_use(amounts, self._used_scopes | self._scopes)

    async def _pin(self, worker_id: str, scope_id: bytes, tier: Tier, hashes: bytes, *, pinned: bool) -> None:
        shard = self._shard_of(worker_id)
        holder = shard.workers[worker_id].active
        if holder >= 0:  # otherwise the holder was closed in the meantime, and nothing is pinned
            shard.table.pins.put(holder, scope_id, tier, split(hashes), pinned=pinned)

    def _count_resident(self) -> ResidentCount:
        found = ResidentCount()
        for shard in self._shards:
            for holder in map(shard.table.holders.__getitem__, shard.table.active):
                for (scope_id, tier), blocks in holder.blocks_in.items():
                    if blocks:  # otherwise the scope may be forgotten
                        found.add(scope_id, tier, blocks, holder.touched[scope_id].bytes_in(tier))
        return found

    def _shard_of(self, worker_id: str) -> MemoryShard:
        return self._shards[shard_of(partition_of(worker_id, self.partitions), self.shards)]


def _residencies(table: BlockTable, scope: Scope, key: bytes) -> list[Residency]:
    return [
        Residency(
            scope,
            int.from_bytes(key, "little"),
            table.active[holder],
            tier,
            table.holders[holder].touched[scope.scope_id].bytes_in(tier),
            pinned=table.pins.has(holder, scope.scope_id, key, tier),
            resumable=table.marks.is_marked(number_bytes(holder), scope.scope_id, key),
        )
        for holder, flags in table.entries(scope.scope_id, key)
        for tier in tiers_of(flags)
    ]
