"""What every residency index promises.

State is kept by worker. A worker's messages are judged by the fence, inside the call that applies them:

- a message of a lower incarnation than the worker's record is dropped;
- a message of a higher incarnation is taken only if it begins a snapshot;
- of the same incarnation only seq = last + 1 is taken; lower or equal is a duplicate and changes nothing; above is a gap,
  remembered as the worker's `want`;
- a snapshot fills a loading holder while the active one answers, and replaces it in the call that takes its end, if count
  and digest are right; otherwise the worker is closed until a higher incarnation.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvatlas.blocks.residency import IndexMetrics, Overlap, Residency
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import RawMessage
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the stream: the stream's creation time (us since 1970) and the last stream seq that was applied."""

    creation_us: int
    seq: int


@dataclass(frozen=True, slots=True)
class PartitionBatch:
    """Messages of one partition in stream order, and the position after the last of them.

    `position` None applies messages without a stream (direct writes). `after_seq` is the stream seq before the first
    message: where the store stands before it (it lost its last writes), or in another stream, nothing is applied and the
    partition is among `Applied.moved`.
    """

    partition: int
    messages: Sequence[RawMessage]
    position: Position | None = None
    after_seq: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The fence of one worker as the index holds it.

    `bad`: only a higher incarnation helps (a failed check, retired, out of memory). `closed`: its messages are not applied.
    `want`: the highest (incarnation, seq) that was met and could not be applied; (0, -1) for none. `answering`: it has an
    active holder.
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
class Applied:
    """What became of a batch: the touched workers' records after it, and messages by outcome.

    `moved` names partitions whose stored position is of another stream than the batch's: nothing of them was applied,
    their reader starts over from the stored position. `no_room`: the store is out of memory; workers that had stores among
    the messages are closed (`oom`), the rest was applied.
    """

    records: Sequence[WorkerRecord]
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    refused: int = 0
    failed_checks: int = 0
    moved: Sequence[int] = ()
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a part of a scrub found.

    `checked`: workers recounted to the end; `damaged`: those whose blocks were not those of their digest, they are `bad`
    now; `strays`: entries that were nobody's, taken out; `given_up`: workers that went on and could not be followed;
    `ended`: the round of all the shard's workers is over.
    """

    checked: int
    damaged: Sequence[str]
    strays: int
    given_up: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Recounted:
    """What the blocks themselves say that a worker holds: its active holder's digest words by scope.

    As of (incarnation, seq); `moved`: the worker went on while it was counted, and the counts say nothing. `sound`: every
    entry is in some tier, has the flags that were told, and its holder is known as the worker's.
    """

    worker_id: str
    incarnation: int
    seq: int
    moved: bool
    scopes: Mapping[Scope, Sequence[int]]
    sound: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the server that holds a shard; `limit_bytes` 0: no limit. `evicts`: it would drop keys by itself."""

    used_bytes: int
    limit_bytes: int
    evicts: bool

    @property
    def free(self) -> float:
        """The free fraction."""
        return 1.0 - self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class ResidencyIndex(Protocol):
    """Who holds which blocks. Hashes are packed sequence hashes (8 little-endian bytes each) or one as an integer."""

    @property
    def partitions(self) -> int:
        """Slices of the stream."""

    @property
    def shards(self) -> int:
        """Slots of the store; a partition lives in shard `partition % shards`."""

    @property
    def persistent(self) -> bool:
        """Does it outlive this process?"""

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> Applied:
        """Fold messages of one shard's partitions, atomically, under the fence above. Idempotent.

        Raises Unreachable where the store does not answer: whether it was applied is then unknown, and applying it
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
        """Say that a worker holds blocks, parent first. For callers that are the only teller of this worker: it takes the
        worker's next seq, so a publisher of the same worker would be out of step. Where indexers run, a worker that
        nobody sends heartbeats of is retired."""

    async def remove(self, scope: Scope, worker_id: str, tier: Tier, hashes: bytes) -> None:
        """Say that a worker holds blocks no longer, child first. See `put`."""

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """Every residency of one block, by worker and tier."""

    async def overlap(self, scope: Scope, hashes: bytes, *, verify: bool = False) -> Overlap:
        """How many leading blocks of a chain each active worker holds. `verify` walks every block too and reports."""

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[int]:
        """Held blocks whose parent is `prefix_hash` (None: roots), ascending. Raises NotSupported without a side index."""

    async def clear_worker(self, worker_id: str) -> None:
        """The worker holds nothing any more: O(1), its memory is given back by `sweep`. See `put`."""

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        """Close a worker's incarnation and drop what it held, if the record still has that incarnation. O(1)."""

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        """Drop the record of a worker that is closed and holds nothing, if it still has that incarnation. A late message of
        it is then judged as of a worker never met."""

    async def forget_scopes(self, idle_s: float) -> int:
        """Forget scopes of which no shard holds a block, and which nobody told for `idle_s` (in one process that need not
        be waited for); how many, some hundred a call."""

    async def clear(self) -> None:
        """Forget everything, also workers and positions."""

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        """Take retired holders out of about `budget_blocks` entries; how many retired holders are left."""

    async def room(self, shard: int) -> Room:
        """Memory of the shard's server. A writer also sees to it that the store can still carry out its calls."""

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> Scrubbed:
        """Go on with a round of recounting what active holders hold against their digests, for about `budget_blocks`
        entries: of all workers, or of those in these partitions when the round began.

        What is found is damage that no message did: it is counted, and the worker is `bad` (it answers on, until a new
        incarnation has come). A worker that goes on meanwhile is followed only by the index that its messages are applied
        through."""

    async def recount(self, worker_ids: Sequence[str]) -> Sequence[Recounted]:
        """Counts what these workers hold from the blocks, not from digests; those that don't answer are left out. Reads
        every block of their shards."""

    async def record(self, worker_id: str) -> WorkerRecord | None:
        """One worker's fence."""

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        """All workers' fences of one shard."""

    async def position(self, partition: int) -> Position | None:
        """The partition's stored position."""

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        """Set it if it still is `expected`; what is stored after the call. All the partition's workers become doubtful
        where a position was replaced (the stream is another one now)."""

    def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        """Every residency of active holders, of one worker or of all. Not atomic against changes while it runs."""

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        """`Digest.words` of the worker's active holder; None where it has none."""

    async def length(self) -> int:
        """Residencies of active holders: one for each (block, worker, tier)."""

    async def metrics(self) -> IndexMetrics:
        """See IndexMetrics."""
