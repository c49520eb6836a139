"""What every residency index promises.

State is kept by worker. The **fence** checks a worker's messages inside the call that applies them:

- a message of a lower incarnation than the worker's record is dropped (stale);
- a message of a higher incarnation is applied only if it begins a snapshot;
- of the same incarnation only seq = last + 1 is applied; lower or equal is a duplicate and changes nothing; above is a gap,
  remembered as the worker's `want`;
- a snapshot fills a loading holder while the active one answers, and replaces it in the call that applies its end, if count
  and digest are right; otherwise the worker is closed until a higher incarnation.
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

    `bad`: only a higher incarnation helps (a failed check, retired, out of memory). `closed`: its messages are not applied.
    `oom`: closed because the store had no memory, or no holder number, for it. `want`: the highest (incarnation, seq) that
    was received and could not be applied; (0, -1) for none. `answering`: it has an active holder; `loading`: it has one
    that a snapshot fills.
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
    """What became of a batch: the records of its workers after it, and its messages by outcome.

    `stored`, `removed`: residencies that came and went. `moved`: partitions whose stored position is not where their batch
    begins. Nothing of them was applied; their reader starts over from the stored position. `no_room`: the store is out of
    memory; workers that had stores among the messages are closed (`oom`), the rest was applied.
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
        """From what an implementation counted."""
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
    """What a part of a scrub found.

    `checked`: workers recounted to the end. `damaged`: those whose blocks differed from their digest; they are `bad` now.
    `strays`: entries of unknown holders, taken out. `given_up`: workers that changed faster than they could be followed.
    `ended`: the round over all the shard's workers is over.
    """

    checked: int
    damaged: Sequence[str]
    strays: int
    given_up: int
    ended: bool


@dataclass(frozen=True, slots=True)
class RecountResult:
    """What a worker holds by the blocks themselves: its active holder's digest words by scope.

    As of (incarnation, seq). `moved`: the worker changed during the count, which is therefore void. `sound`: every
    entry is in some tier, has no other flags, and its holder is registered as the worker's. `marks`: the digest
    words of its marks; empty without any.
    """

    worker_id: str
    incarnation: int
    seq: int
    moved: bool
    scopes: Mapping[Scope, Sequence[int]]
    sound: bool = True
    marks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a shard's server; `limit_bytes` 0: no limit. `evicts`: the server would drop keys by itself."""

    used_bytes: int
    limit_bytes: int
    evicts: bool

    @property
    def free(self) -> float:
        """The free fraction."""
        return 1.0 - self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class ResidencyIndex(Protocol):
    """Which worker holds which blocks. Hashes are packed sequence hashes (8 little-endian bytes each) or one as an integer."""

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
        """Does it outlive this process?"""

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        """Apply messages of one shard's partitions, atomically, under the fence above. Idempotent.

        Raises Unreachable if the store does not answer: whether they were applied is then unknown, and applying them
        again is right.
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
        seq, so a publisher of the same worker would be out of step. Running indexers retire a worker without heartbeats.

        `pinned` is kept as the last put of a block in a tier said it, until a remove, a clear or a new incarnation; nothing
        but `Residency.pinned` depends on it."""

    async def remove(self, scope: Scope, worker_id: str, tier: Tier | None, hashes: bytes) -> int:
        """Take blocks from a worker, child first: from one tier, or (None) from all. Returns how many residencies it took, one
        for each (block, tier). See `put`."""

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """Every residency of one block, by worker and tier."""

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """How many leading blocks of a chain each active worker holds, and how many of them those with marks can reuse: up to
        `limit` (None: all), counted from the chain's start. `first_index`: the first hash's index in the chain, a multiple of
        64. `verify` walks every block too, and returns the differences."""

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        """Every residency of the blocks that follow `prefix_hash` (None: of first blocks), by hash, worker and tier. Raises
        NotSupported without a side index."""

    async def clear_worker(self, worker_id: str) -> None:
        """Take all blocks from a worker: O(1), `sweep` gives the memory back. See `put`."""

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        """Close a worker's incarnation and drop what it held, if the record still has that incarnation. O(1)."""

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        """Drop the record of a worker that is closed and holds nothing, if it still has that incarnation. A late message is
        then checked like one of a new worker."""

    async def forget_scopes(self, idle_s: float) -> int:
        """Forget scopes without a block in any shard that no message used for `idle_s` (the memory index need not wait).
        Returns how many, up to some hundred a call."""

    async def clear(self) -> None:
        """Forget everything, also workers and positions."""

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        """Take retired holders out of about `budget_blocks` entries. Returns how many retired holders are left."""

    async def room(self, shard: int) -> Room:
        """Memory of the shard's server. A writer's call also loads the store's functions if they are gone."""

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        """Continue a round that recounts active holders' blocks against their digests, for about `budget_blocks` entries:
        of all workers, or of those in these partitions when the round began.

        It finds damage that no message did: that is counted, and the worker is `bad` (it answers until a new incarnation
        comes). A worker that changes meanwhile can be followed only by the index through which its messages are applied."""

    async def recount(self, worker_ids: Sequence[str]) -> Sequence[RecountResult]:
        """Count what these workers hold from the blocks, not from digests; workers without an active holder are left out.
        Reads every block of their shards."""

    async def record(self, worker_id: str) -> WorkerRecord | None:
        """One worker's fence."""

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        """All workers' fences of one shard."""

    async def position(self, partition: int) -> Position | None:
        """The partition's stored position."""

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        """Set it if it still is `expected`. Returns what is stored after the call. If a position was replaced, all the
        partition's workers become `bad`: the stream is another one now."""

    def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        """Every residency of active holders, of one worker or of all. Not atomic against changes while it runs."""

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        """`Digest.words` of the worker's active holder, and behind them, if it has marks, `MarkDigest.words`; None without a
        holder."""

    async def length(self) -> int:
        """Residencies of active holders: one for each (block, worker, tier)."""

    async def is_empty(self) -> bool:
        """Does no active holder have a block?"""

    async def resident_blocks(self) -> Sequence[ResidentBlocks]:
        """Blocks and bytes of active holders by the scopes' text and tier."""

    async def usage(self) -> Sequence[ResidentUse]:
        """See `ResidentUse`, by the scopes' text and tier: of what is resident, and of what was."""

    async def metrics(self) -> IndexMetrics:
        """See IndexMetrics. Reads the store: some calls for each holder."""

    @property
    def work(self) -> IndexWork:
        """See IndexWork."""
