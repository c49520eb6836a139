"""Index events: publishers announce them, the bus carries them (`kvatlas.bus.wire`), and an index applies them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas.blocks.block_sizes import BlockSizes, TierBytes
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """A scope as one worker uses it, with the sizes of the worker's blocks: see `BlockSizes`."""

    scope: Scope
    block_size: int
    block_bytes: int = 0
    tier_bytes: TierBytes = ()

    @property
    def sizes(self) -> BlockSizes:
        return BlockSizes(self.block_size, self.block_bytes, self.tier_bytes)


@dataclass(frozen=True, slots=True)
class Stored:
    """The worker now holds these blocks of one chain in `tier`. `hashes` are packed sequence hashes, parent first.

    `parent` is the packed sequence hash of the block before the first one, None at a root; `first_index` is the index of the
    first block.
    """

    scope_id: bytes
    tier: Tier
    hashes: bytes
    parent: bytes | None = None
    first_index: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """The worker no longer holds these blocks in `tier`. `hashes` are packed, child first."""

    scope_id: bytes
    tier: Tier
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The worker no longer holds anything in any tier, and has no marks."""


@dataclass(frozen=True, slots=True)
class Marked:
    """The worker can resume a prompt at these blocks, which it holds (see `SnapshotBegin.dropped`). `hashes` are packed."""

    scope_id: bytes
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Unmarked:
    """The worker can no longer resume a prompt at these blocks. `hashes` are packed."""

    scope_id: bytes
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Heads:
    """Where blocks are marked after each head (a block whose index is a multiple of 64): bit i is set if some block at offset i
    (0 to 63) in the head's subtree is marked. `hashes` are packed. `bits` holds 8 big-endian bytes for each head, with offset 0
    in the lowest bit; if they are all 0, nothing is marked."""

    scope_id: bytes
    hashes: bytes
    bits: bytes


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """A new incarnation begins: the events up to the end of the snapshot are everything that the worker holds.

    `dropped=None`: a prompt can resume after every block that is held. Otherwise it can only resume at marks, and a mark on
    block i means that the first i + 1 - dropped blocks can be reused.
    """

    dropped: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of a snapshot; the fields are those of `Stored`. Chunks may arrive in any order."""

    scope_id: bytes
    tier: Tier
    hashes: bytes
    parent: bytes | None = None
    first_index: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is complete: it consisted of `chunks` chunk events. `digest` is its `Digest.words`, followed by its
    `MarkDigest.words` if it has marks."""

    chunks: int
    digest: Sequence[int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`digest` is the `Digest.words` of what the worker holds now, followed by `MarkDigest.words` if it has marks."""

    digest: Sequence[int]


IndexEvent = (
    Stored | Removed | Cleared | Marked | Unmarked | Heads | SnapshotBegin | SnapshotChunk | SnapshotEnd | Checkpoint
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a worker's incarnation; `seq` counts from 0 (the beginning of the snapshot) without gaps."""

    worker_id: str
    incarnation: int
    seq: int
    events: Sequence[IndexEvent]
    scopes: dict[bytes, ScopeUse] = field(default_factory=dict)
    ts_us: int = 0
