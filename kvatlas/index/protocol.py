"""The promises of every residency index.

State is kept by worker. The **fence** checks a worker's messages inside the call that applies them:

- a message of a lower incarnation than the worker's record is dropped (stale);
- a message of a higher incarnation is applied only if it begins a snapshot;
- within the same incarnation only seq = last + 1 is applied; a lower or equal seq is a duplicate and changes nothing; a
  higher one is a gap, remembered as the worker's `want`;
- a snapshot fills a loading holder while the active one answers, and replaces it in the call that applies its end, if count and
  digest are right; otherwise the worker is closed until a higher incarnation begins.
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
    """The fence of one worker as the index has it.

    `bad`: only a higher incarnation helps (a check failed, or the worker was retired or out of memory). `closed`: its messages
    are not applied. `oom`: closed because the store had no memory, or no holder number, for it. `want`: the highest
    (incarnation, seq) that was received but could not be applied; (0, -1) for none. `answering`: it has an active holder;
    `loading`: a snapshot is filling another one.
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
    """The result of applying a batch: the records of its workers afterwards, and its messages by outcome.

    `stored`, `removed`: residencies added and removed. `moved`: partitions whose stored position is not where their batch
    begins. None of their messages was applied; their reader starts over from the stored position. `no_room`: the store is
    out of memory; workers with stores among the messages are closed (`oom`), the rest was applied.
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
        """The result, from an implementation's counts."""
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
    """The findings of one part of a scrub.

    `checked`: workers recounted to the end. `damaged`: those whose blocks differed from their digest; they are `bad` now.
    `strays`: entries of unknown holders that were removed. `given_up`: workers that changed too fast to be followed.
    `ended`: the round over all the shard's workers is over.
    """

    checked: int
    damaged: Sequence[str]
    strays: int
    given_up: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a shard's server; `limit_bytes` 0: no limit. `evicts`: the server would drop keys on its own."""

    used_bytes: int
    limit_bytes: int
    evicts: bool

    @property
    def free(self) -> float:
        """The free fraction of the memory."""
        return 1.0 - self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class ResidencyIndex(Protocol):
    """Which worker holds which blocks. Hashes are packed sequence hashes (8 little-endian bytes each), or one integer."""

    @property
    def name(self) -> str:
        """The implementation: `memory`, `sqlite` or `redis`."""

    @property
    def partitions(self) -> int:
        """Slices of the stream."""

    @property
    def shards(self) -> int:
        """Slots of the store; a partition lives in shard `partition % shards`."""

    @property
    def persistent(self) -> bool:
        """True if the index outlives this process."""

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        """Apply messages of one shard's partitions, atomically, under the fence above. Idempotent.

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
        """Add blocks to a worker, parent first. For callers that are the worker's only source: it takes the worker's next
        seq, so a publisher of the same worker would get out of sequence. Running indexers retire a worker without
        heartbeats.

        `pinned` is kept as last put for a block and tier, until a remove, a clear or a new incarnation. Only
        `Residency.pinned` depends on it."""

    async def remove(self, scope: Scope, worker_id: str, tier: Tier | None, hashes: bytes) -> int:
        """Remove blocks from a worker, child first, from one tier or (None) from all. Returns the number of removed
        residencies, one for each (block, tier). See `put`."""

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """Every residency of one block, by worker and tier."""

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """The number of leading blocks of a chain that each active worker holds, and how many of them workers with marks can
        reuse: up to `limit` (None: all), counted from the chain's start. `first_index`: the first hash's index in the chain, a
        multiple of 64. `verify` also walks every block, and returns the differences."""

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        """Every residency of the blocks that follow `prefix_hash` (None: of first blocks), by hash, worker and tier. Raises
        NotSupported without a side index."""

    async def clear_worker(self, worker_id: str) -> None:
        """Remove all blocks from a worker: O(1); `sweep` frees the memory. See `put`."""

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        """Close a worker's incarnation and drop what it held, if the record still has that incarnation. O(1)."""

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        """Drop the record of a worker that is closed and holds nothing, if it still has that incarnation. A late message is
        then checked like one of a new worker."""

    async def forget_scopes(self, idle_s: float) -> int:
        """Forget scopes that have no block in any shard and that no message used for `idle_s` (the memory index need not
        wait). Returns their number, at most a few hundred per call."""

    async def clear(self) -> None:
        """Forget everything, including workers and positions."""

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        """Remove retired holders from about `budget_blocks` entries. Returns how many retired holders are left."""

    async def room(self, shard: int) -> Room:
        """Memory of the shard's server. A writer's call also loads the store's functions if they are gone."""

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        """Continue a round that recounts active holders' blocks against their digests, for about `budget_blocks` entries:
        of all workers, or of those in these partitions when the round began.

        It finds damage that no message caused. Damage is counted, and the worker becomes `bad` (it answers until a new
        incarnation begins). A worker that changes meanwhile can be followed only by the index through which its messages
        are applied."""

    async def record(self, worker_id: str) -> WorkerRecord | None:
        """One worker's fence."""

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        """All workers' fences of one shard."""

    async def position(self, partition: int) -> Position | None:
        """The partition's stored position."""

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        """Set the position if it is still `expected`. Returns what is stored after the call. If a position was replaced,
        all the partition's workers become `bad`, because it is a different stream now."""

    def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        """Every residency of active holders, of one worker or of all. Not atomic: changes may happen in the
        meantime."""

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        """`Digest.words` of the worker's active holder, followed by `MarkDigest.words` if it has marks; None if there
        is no holder."""

    async def claimed(self, worker_ids: Sequence[str]) -> Mapping[str, int]:
        """How many blocks each of these workers stored, over all tiers: in its active holder or in the one that a snapshot
        fills, whichever has more. Workers without a holder are left out."""

    async def length(self) -> int:
        """Residencies of active holders: one for each (block, worker, tier)."""

    async def is_empty(self) -> bool:
        """True if no active holder has a block."""

    async def resident_blocks(self) -> Sequence[ResidentBlocks]:
        """Blocks and bytes of active holders by the scopes' text and tier."""

    async def usage(self) -> Sequence[ResidentUse]:
        """Byte-seconds per scope and tier since the index began, including blocks removed since. Sorted by the scopes' text,
        then by tier."""

    async def metrics(self) -> IndexMetrics:
        """Sizes by model; see IndexMetrics. Reads the store: a few calls per holder."""

    @property
    def work(self) -> IndexWork:
        """See IndexWork."""
