"""Direct writes: put, remove and clear, turned into messages of an incarnation that the caller publishes.

There is only one way into the index: a direct write is an ordinary message, and the fence checks it like any other.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.errors import KvatlasError
from kvatlas.events import Cleared, IndexEvent, Message, Removed, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope, check_worker_id, shard_of
from kvatlas.index.protocol import ApplyResult, WorkerRecord

_TRIES = 5
_HASHES_A_MESSAGE = 32_768


class DirectWrites(ABC):
    """Adds put, remove, clear and `is_empty` to an index that has everything else; see `ResidencyIndex` for what they
    promise."""

    partitions: int
    shards: int

    @abstractmethod
    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult: ...

    @abstractmethod
    async def record(self, worker_id: str) -> WorkerRecord | None: ...

    @abstractmethod
    async def length(self) -> int: ...

    @abstractmethod
    async def _pin(self, worker_id: str, scope_id: bytes, tier: Tier, hashes: bytes, *, pinned: bool) -> None:
        """Note whether these blocks of the worker's active holder are pinned in this tier."""

    async def is_empty(self) -> bool:
        return await self.length() == 0

    async def put(
        self,
        use: ScopeUse,
        worker_id: str,
        tier: Tier,
        hashes: bytes,
        *,
        parent: int | None = None,
        first_index: int = 0,
        pinned: bool = False,
    ) -> None:
        before = parent.to_bytes(HASH_BYTES, "little") if parent is not None else None
        if tier is not Tier.HBM and use.block_bytes:  # the size of the blocks in this tier, not in the device's memory
            use = replace(use, block_bytes=0, tier_bytes=((tier, use.block_bytes),))
        for first in range(0, len(hashes), _HASHES_A_MESSAGE * HASH_BYTES):
            part = hashes[first : first + _HASHES_A_MESSAGE * HASH_BYTES]
            event = Stored(use.scope.scope_id, tier, part, before, first_index + first // HASH_BYTES)
            await self._write(worker_id, [event], use)
            await self._pin(worker_id, use.scope.scope_id, tier, part, pinned=pinned)
            before = part[-HASH_BYTES:]

    async def remove(self, scope: Scope, worker_id: str, tier: Tier | None, hashes: bytes) -> int:
        use, removed = ScopeUse(scope, 1), 0
        tiers = tuple(Tier) if tier is None else (tier,)
        part_bytes = _HASHES_A_MESSAGE // len(tiers) * HASH_BYTES
        for first in range(0, len(hashes), part_bytes):
            part = hashes[first : first + part_bytes]
            events = [Removed(scope.scope_id, one, part) for one in tiers]
            removed += (await self._write(worker_id, events, use)).removed
            for one in tiers:
                await self._pin(worker_id, scope.scope_id, one, part, pinned=False)
        return removed

    async def clear_worker(self, worker_id: str) -> None:
        await self._write(worker_id, [Cleared()], None)

    async def _write(self, worker_id: str, changes: Sequence[IndexEvent], use: ScopeUse | None) -> ApplyResult:
        partition = partition_of(check_worker_id(worker_id), self.partitions)
        uses = {use.scope.scope_id: use} if use is not None else {}
        for _ in range(_TRIES):
            record = await self.record(worker_id)
            events = changes
            if record is None or record.closed or not record.answering:
                last = record.incarnation if record is not None else 0
                incarnation, seq = max(last + 1, time.time_ns()), 0
                events = [SnapshotBegin(), SnapshotEnd(0, Digest().words), *changes]
            else:
                incarnation, seq = record.incarnation, record.seq + 1
            message = Message(worker_id, incarnation, seq, events, uses, time.time_ns() // 1000)
            batch = PartitionBatch(partition, [wire.to_raw(message)])
            result = await self.apply(shard_of(partition, self.shards), [batch])
            if result.applied:
                return result
        raise KvatlasError(f"worker {worker_id}: it has another publisher; {_TRIES} direct writes were out of sequence")
