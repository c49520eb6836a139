"""The messages that a worker's publisher would send, for tests."""

from collections.abc import Mapping, Sequence

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.events import (
    Cleared,
    Heads,
    IndexEvent,
    Marked,
    Message,
    Removed,
    ScopeUse,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stored,
    Unmarked,
)
from kvatlas.identity import Scope, shard_of
from kvatlas.index.protocol import ApplyResult, ResidencyIndex

BLOCK_SIZE = 4
BLOCK_BYTES = 1_000

Held = dict[tuple[Scope, bytes], set[Tier]]


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


class MessageSource:
    """One worker's publisher, without a bus. `held`: what the worker holds according to its messages; `sizes`: sizes of its
    blocks in the next message. With `dropped`, marks count: `marks` are those of its messages, and `places` says for each
    block that may be marked its head and its offset there."""

    def __init__(
        self,
        worker_id: str,
        incarnation: int = 1,
        *,
        dropped: int | None = None,
        places: Mapping[bytes, tuple[bytes, int]] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.seq = -1
        self.held: Held = {}
        self.dropped = dropped
        self.places = places or {}
        self.marks: set[tuple[Scope, bytes]] = set()
        self.sizes = BlockSizes(BLOCK_SIZE, BLOCK_BYTES)

    def message(self, *events: IndexEvent, scopes: Sequence[Scope] = ()) -> wire.RawMessage:
        """The next message of the incarnation."""
        self.seq += 1
        uses = {scope.scope_id: ScopeUse(scope, *self.sizes) for scope in scopes}
        return wire.to_raw(Message(self.worker_id, self.incarnation, self.seq, events, uses, 1))

    def begin(self, incarnation: int) -> wire.RawMessage:
        """Begin a new incarnation, whose snapshot is all that is held now, in one message."""
        self.incarnation, self.seq = incarnation, -1
        chunks = [
            SnapshotChunk(scope.scope_id, tier, key)
            for (scope, key), tiers in self.held.items()
            for tier in sorted(tiers)
        ]
        marks = [Marked(scope.scope_id, key) for scope, key in self.marks]
        heads = [_heads(scope, key, bits) for (scope, key), bits in self.heads().items()]
        end = SnapshotEnd(len(chunks), self.digest_words())
        scopes = [scope for scope, _ in (*self.held, *self.marks)]
        return self.message(SnapshotBegin(self.dropped), *chunks, *marks, *heads, end, scopes=scopes)

    def heads(self) -> dict[tuple[Scope, bytes], int]:
        """The bits of each head."""
        heads: dict[tuple[Scope, bytes], int] = {}
        for scope, key in self.marks:
            head, offset = self.places[key]
            heads[scope, head] = heads.get((scope, head), 0) | 1 << offset
        return heads

    def mark(self, scope: Scope, keys: Sequence[bytes], *, unmark: bool = False) -> wire.RawMessage:
        """Mark blocks, or unmark them."""
        before = self.heads()
        for key in keys:
            (self.marks.discard if unmark else self.marks.add)((scope, key))
        now = self.heads()
        packed = b"".join(keys)
        change = Unmarked(scope.scope_id, packed) if unmark else Marked(scope.scope_id, packed)
        heads = [
            _heads(scope, key, now.get((scope, key), 0))
            for one, key in {**before, **now}
            if one == scope and before.get((scope, key)) != now.get((scope, key))
        ]
        return self.message(change, *heads, scopes=[scope])

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
        self.marks.clear()
        return self.message(Cleared())

    def digest_words(self) -> list[int]:
        """The digest words of a snapshot's end or a checkpoint."""
        if self.dropped is None:
            return self.digest().words
        marks = MarkDigest()
        for scope, key in self.marks:
            marks.add_marks(scope.scope_id, key)
        for (scope, key), bits in self.heads().items():
            marks.add_head(scope.scope_id, key, bits)
        return self.digest().words + marks.words

    def digest(self) -> Digest:
        digest = Digest()
        for (scope, key), tiers in self.held.items():
            for tier in tiers:
                digest.add(scope.scope_id, tier, key)
        return digest


def _heads(scope: Scope, key: bytes, bits: int) -> Heads:
    return Heads(scope.scope_id, key, bits.to_bytes(8, "big"))


async def apply_messages(index: ResidencyIndex, *messages: wire.RawMessage) -> ApplyResult:
    """Apply messages of one worker, without a stream."""
    partition = partition_of(messages[0][wire.WORKER_ID], index.partitions)
    return await index.apply(shard_of(partition, index.shards), [PartitionBatch(partition, messages)])


async def contents(index: ResidencyIndex, worker_id: str) -> Held:
    """What a worker holds according to the index."""
    held: Held = {}
    async for residency in index.snapshot(worker_id):
        key = residency.sequence_hash.to_bytes(HASH_BYTES, "little")
        held.setdefault((residency.scope, key), set()).add(residency.tier)
    return held
