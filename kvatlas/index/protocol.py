"""The promises of every residency index.

State is kept by worker. The **fence** checks a worker's messages inside the call that applies them:

- a message with a lower incarnation than that of the worker's record is dropped (stale);
- a message with a higher incarnation is applied only if it begins a snapshot;
- within the same incarnation, only seq = last + 1 is applied; a lower or equal seq is a duplicate and changes nothing; a higher
  one is a gap, and is remembered as the worker's `want`;
- a snapshot fills a loading holder while the active one answers. The call that applies the end of the snapshot puts the loading
  holder in its place if count and digest are right; otherwise the worker is closed until a higher incarnation begins.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvatlas.blocks.residency import IndexMetrics, IndexWork, Overlap, Residency, ResidentBlocks
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.usage import ResidentUse

DEFAULT_PARTITIONS = 64
DEFAULT_SHARDS = 1


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The fence of one worker, as the index knows it.

    `bad`: only a higher incarnation helps (a check failed, or the worker was retired or out of memory). `closed`: its messages
    are not applied. `oom`: closed because the store had no memory, or no holder number, for it. `want`: the highest
    (incarnation, seq) that was received but could not be applied; (0, -1) if there is none. `answering`: it has an active
    holder; `loading`: a snapshot is filling another one.
    """

    worker_id: str
    incarnation: int
    seq: int
    partition: int
    bad: bool = False
    closed: bool = False
    oom: bool = False
    want: tuple[int, int] = (0, -1)
    answering: bool = False
    loading: bool = False


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """The result of applying a batch: the records of its workers after the call, and its messages by outcome.

    `stored`, `removed`: residencies added and removed. `moved`: partitions whose stored position is not where their batch
    begins. None of their messages was applied; their reader starts over from the stored position. `no_room`: the store is out
    of memory; workers that have stores among the messages are closed (`oom`), and the rest was applied.
    """

    records: Sequence[WorkerRecord]
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    refused: int = 0
    failed_checks: int = 0
    stored: int = 0
    removed: int = 0
    moved: Sequence[int] = ()
    no_room: bool = False

    @classmethod
    def of(
        cls, records: Sequence[WorkerRecord], counts: ApplyCounts, moved: Sequence[int], *, no_room: bool
    ) -> "ApplyResult":
        """The result, computed from an implementation's counts."""
        return cls(
            records,
            counts.applied,
            counts.duplicates,
            counts.stale,
            counts.gaps,
            counts.refused,
            counts.failed_checks,
            counts.stored,
            counts.removed,
            tuple(moved),
            no_room,
        )


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """What one part of a scrub has found.

    `checked`: workers that were recounted to the end. `damaged`: those whose blocks differed from their digest; they are now
    `bad`. `strays`: entries of unknown holders that were removed. `given_up`: workers that changed too fast to keep up with.
    `ended`: the round over all workers of the shard is over.
    """

    checked: int
    damaged: Sequence[str]
    strays: int
    given_up: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a shard's server; `limit_bytes` 0: no limit. `evicts`: the server would drop keys on its own."""

    used_bytes: int
    limit_bytes: int
    evicts: bool

    @property
    def free(self) -> float:
        """The fraction of the memory that is free."""
        return 1.0 - self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class ResidencyIndex(Protocol):
    """Which worker holds which blocks. Hashes are packed sequence hashes (8 little-endian bytes each), or one integer."""

    @property
    def name(self) -> str:
        """The implementation: `memory`, `sqlite` or `redis`."""

    @property
    def partitions(self) -> int:
        """The number of partitions: slices of the stream."""

    @property
    def shards(self) -> int:
        """The number of shards: slots of the store; a partition lives in shard `partition % shards`."""

    @property
    def persistent(self) -> bool:
        """True if the index outlives this process."""

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        """Apply messages of one shard's partitions, atomically and subject to the fence above. Idempotent.

        Raises Unreachable if the store does not answer. It is then unknown whether the messages were applied; applying them
        again is safe.
        """

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
        """Add blocks to a worker, parent first. For callers that are the worker's only source: it takes the worker's next seq,
        so a publisher of the same worker would get out of sequence. Running indexers retire a worker that sends no heartbeats.

        `pinned` stays as last put for a block and tier, until a remove, a clear or a new incarnation. Only `Residency.pinned`
        depends on it."""

    async def remove(self, scope: Scope, worker_id: str, tier: Tier | None, hashes: bytes) -> int:
        """Remove blocks from a worker, child first, from one tier or (None) from all of them. Returns the number of removed
        residencies, one for each (block, tier). See `put`."""

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """Every residency of one block, by worker and tier."""

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """The number of leading blocks of a chain that each active worker holds, and how many of them workers with marks can
        reuse: up to `limit` (None: all), counted from the start of the chain. `first_index`: the index of the first hash in the
        chain, a multiple of 64. `verify` also walks every block, and returns the differences."""

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        """Every residency of the blocks that follow `prefix_hash` (None: of first blocks), by hash, worker and tier. Raises
        NotSupported without a side index."""

    async def clear_worker(self, worker_id: str) -> None:
        """Remove all blocks from a worker. O(1), because `sweep` frees the memory. See `put`."""

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        """Close a worker's incarnation and drop what it held, if the record still has that incarnation. O(1)."""

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        """Drop the record of a worker that is closed and holds nothing, if it still has that incarnation. A late message is
        then checked like a message of a new worker."""

    async def forget_scopes(self, idle_s: float) -> int:
        """Forget scopes that have no blocks in any shard and that no message has used for `idle_s` (the memory index need not
        wait). Returns how many were forgotten, at most a few hundred per call."""

    async def clear(self) -> None:
        """Forget everything, including workers and positions."""

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        """Remove retired holders from about `budget_blocks` entries. Returns the number of retired holders that are left."""

    async def room(self, shard: int) -> Room:
        """The memory of the shard's server. If a writer calls this, it also loads the store's functions if they are gone."""

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        """Continue a round that recounts active holders' blocks and compares them with their digests, for about `budget_blocks`
        entries. The round covers all workers, or those that were in these partitions when it began.

        It finds damage that no message caused. The damage is counted, and the worker becomes `bad` (it answers until a new
        incarnation begins). If a worker changes during the round, only the index through which its messages are applied can
        keep up with it."""

    async def record(self, worker_id: str) -> WorkerRecord | None:
        """The fence of one worker."""

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        """The fences of all workers in one shard."""

    async def position(self, partition: int) -> Position | None:
        """The partition's stored position."""

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        """Set the position if it is still `expected`. Returns what is stored after the call. If a position was replaced, all
        workers of the partition become `bad`, because the stream is a different one now."""

    def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        """Every residency of active holders, of one worker or of all. Not atomic: there may be changes in the meantime."""

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        """`Digest.words` of the worker's active holder, followed by `MarkDigest.words` if it has marks; None if there is no
        active holder."""

    async def claimed(self, worker_ids: Sequence[str]) -> Mapping[str, int]:
        """How many blocks each of these workers has stored, over all tiers: in its active holder or in the one that a snapshot
        is filling, whichever has more. Workers without a holder are left out."""

    async def length(self) -> int:
        """The number of residencies of active holders: one for each (block, worker, tier)."""

    async def is_empty(self) -> bool:
        """True if no active holder has any blocks."""

    async def resident_blocks(self) -> Sequence[ResidentBlocks]:
        """Blocks and bytes of active holders, by the text of the scopes and by tier."""

    async def usage(self) -> Sequence[ResidentUse]:
        """Byte-seconds per scope and tier since the index began, including blocks that have since been removed. Sorted by the
        text of the scopes, then by tier."""

    async def metrics(self) -> IndexMetrics:
        """Sizes by model; see IndexMetrics. Reads from the store: a few calls per holder."""

    @property
    def work(self) -> IndexWork:
        """See IndexWork."""
