"""The messages that a worker's publisher would send, for tests."""

from collections.abc import Sequence

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.events import (
    Cleared,
    IndexEvent,
    Message,
    Removed,
    ScopeUse,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stored,
)
from kvatlas.identity import Scope, partition_of, shard_of
from kvatlas.index.protocol import ApplyResult, PartitionBatch, ResidencyIndex

BLOCK_SIZE = 4
BLOCK_BYTES = 1_000

Held = dict[tuple[Scope, bytes], set[Tier]]


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


class MessageSource:
    """One worker's publisher, without a bus. `held`: what the worker holds by its messages."""

    def __init__(self, worker_id: str, incarnation: int = 1) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.seq = -1
        self.held: Held = {}

    def message(self, *events: IndexEvent, scopes: Sequence[Scope] = ()) -> wire.RawMessage:
        """The next message of the incarnation."""
        self.seq += 1
        uses = {scope.scope_id: ScopeUse(scope, BLOCK_SIZE, BLOCK_BYTES) for scope in scopes}
        return wire.to_raw(Message(self.worker_id, self.incarnation, self.seq, events, uses, 1))

    def begin(self, incarnation: int) -> wire.RawMessage:
        """Begin a new incarnation, whose snapshot is all that is held now, in one message."""
        self.incarnation, self.seq = incarnation, -1
        chunks = [
            SnapshotChunk(scope.scope_id, tier, key)
            for (scope, key), tiers in self.held.items()
            for tier in sorted(tiers)
        ]
        end = SnapshotEnd(len(chunks), self.digest().words)
        return self.message(SnapshotBegin(), *chunks, end, scopes=[scope for scope, _ in self.held])

    def store(self, scope: Scope, hashes: bytes, tier: Tier = Tier.HBM, parent: bytes | None = None) -> wire.RawMessage:
        for key in split(hashes):
            self.held.setdefault((scope, key), set()).add(tier)
        return self.message(Stored(scope.scope_id, tier, hashes, parent), scopes=[scope])

    def remove(self, scope: Scope, hashes: bytes, tier: Tier = Tier.HBM) -> wire.RawMessage:
        for key in split(hashes):
            tiers = self.held.get((scope, key), set())
            tiers.discard(tier)
            if not tiers:
                self.held.pop((scope, key), None)
        return self.message(Removed(scope.scope_id, tier, hashes), scopes=[scope])

    def clear(self) -> wire.RawMessage:
        self.held.clear()
        return self.message(Cleared())

    def digest(self) -> Digest:
        digest = Digest()
        for (scope, key), tiers in self.held.items():
            for tier in tiers:
                digest.add(scope.scope_id, tier, key)
        return digest


async def apply_messages(index: ResidencyIndex, *messages: wire.RawMessage) -> ApplyResult:
    """Apply messages of one worker, without a stream."""
    partition = partition_of(messages[0][wire.WORKER_ID], index.partitions)
    return await index.apply(shard_of(partition, index.shards), [PartitionBatch(partition, messages)])


async def contents(index: ResidencyIndex, worker_id: str) -> Held:
    """What a worker holds by the index."""
    held: Held = {}
    async for residency in index.snapshot(worker_id):
        key = residency.sequence_hash.to_bytes(HASH_BYTES, "little")
        held.setdefault((residency.scope, key), set()).add(residency.tier)
    return held
