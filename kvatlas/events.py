"""The two vocabularies of events: what an engine says of its cache, and what a publisher tells the index.

Engine events are what the adapters in `publishers/engines` make of an engine's bytes, in one engine-neutral form for the
ledger. Index events are what travels on the bus (`kvatlas.bus.wire`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope

EngineHash = int | bytes
"""A block's name in one engine: an integer (vLLM unsigned, SGLang signed) or raw digest bytes."""


# ---------------------------------------------------------------- what an engine says


@dataclass(frozen=True, slots=True)
class EngineStored:
    """Blocks were stored, once for each physical copy.

    `token_ids` holds `len(hashes) * block_size` ids, or none for an offload placeholder, which names blocks that are
    known by their hash. `extra_keys` has one entry a block, or is None; neither the adapter nor the salt is in it
    (canonical form: `kvatlas.blocks.hashing`). `indexable` is False for a group that says nothing of how long a prefix
    can be reused (anything but full attention): its copies are counted, never announced. `salt_inherited`: behind a parent,
    no salt means the parent's (vLLM tells it with the first block alone; SGLang with every event of its chain).
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    tier: Tier = Tier.HBM
    group: int = 0
    adapter: str | None = None
    salt: str | None = None
    extra_keys: Sequence[ExtraKeys] | None = None
    indexable: bool = True
    salt_inherited: bool = True


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """One physical copy of each block is gone."""

    hashes: Sequence[EngineHash]
    tier: Tier = Tier.HBM
    group: int = 0


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Every block of the tiers is gone; by default the device tier alone (vLLM: a connector's CPU tier stays)."""

    tiers: Sequence[Tier] = (Tier.HBM,)


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """One step's events. `skipped` names each event that could not be understood: they are counted, never the batch.

    `lost`: one of them may have taken blocks away, so what was held before it is not known any more; `events` are those
    that came after it.
    """

    events: Sequence[EngineEvent]
    ts: float = 0.0
    dp_rank: int | None = None
    skipped: Sequence[str] = ()
    lost: bool = False


# ---------------------------------------------------------------- what a publisher tells the index


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """A scope as one worker uses it: tokens a block, and bytes of KV cache a block (0: not told)."""

    scope: Scope
    block_size: int
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """The worker now holds these blocks of one chain in `tier`. `hashes` are packed sequence hashes, parent first.

    `parent` is the packed sequence hash before the first one, None at a root; `first_index` the first one's block index.
    """

    scope_id: bytes
    tier: Tier
    hashes: bytes
    parent: bytes | None = None
    first_index: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """The worker no longer holds these blocks in `tier`. `hashes` are packed, child first."""

    scope_id: bytes
    tier: Tier
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The worker holds nothing any more, in any tier."""


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """A new incarnation: what follows, up to the end, is all that the worker holds."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of a snapshot; the fields are those of `Stored`. The order of chunks is free."""

    scope_id: bytes
    tier: Tier
    hashes: bytes
    parent: bytes | None = None
    first_index: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is whole: it had `chunks` chunk events, and its digest (`Digest.words`) is this."""

    chunks: int
    digest: Sequence[int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the worker holds now has this digest (`Digest.words`)."""

    digest: Sequence[int]


IndexEvent = Stored | Removed | Cleared | SnapshotBegin | SnapshotChunk | SnapshotEnd | Checkpoint


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a worker's incarnation; `seq` counts from 0 (the snapshot's begin) without a hole."""

    worker_id: str
    incarnation: int
    seq: int
    events: Sequence[IndexEvent]
    scopes: dict[bytes, ScopeUse] = field(default_factory=dict)
    ts_us: int = 0
