"""Events about an engine's cache, in a form that does not depend on the engine.

The adapters in `publishers/engines` decode an engine's bytes into these events, and the ledger reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import OWN_CHAIN

EngineHash = int | bytes
"""A block's name in one engine: an integer (vLLM unsigned, SGLang signed) or raw digest bytes."""


PROCESS_TIERS = (Tier.HBM, Tier.CPU_DRAM)
"""Tiers in the memory of the engine's own process. Disks and stores outlive it."""


@dataclass(frozen=True, slots=True)
class LocalHashes:
    """Local hashes of blocks whose tokens are unknown: one for each hash in the event.

    `chain`: see `kvatlas.identity.Scope`. `root`: the hash before a prompt's first block (of external chains).
    """

    hashes: Sequence[int]
    chain: str = OWN_CHAIN
    root: int | None = None


@dataclass(slots=True)  # not frozen, which would triple the time to create one for each message
class EngineStored:
    """Blocks were stored; one event for each physical copy.

    `token_ids`: `len(hashes) * block_size` ids, or none for an offload placeholder, which names blocks already known by their
    hash. `extra_keys`: one entry per block, or None; it contains neither the adapter nor the salt (canonical form:
    `kvatlas.blocks.hashing`). `kind` and `window_tokens`: the attention of the group, None if not in the event.
    `lookahead_tokens`: number of tokens after a block that its hash covers; `lookahead`: the tokens after the last block.
    `salt_inherited`: an event with a parent but no salt has its parent's salt (vLLM sends the salt only with the first block,
    SGLang with every event of a chain). `adapter_named=False`: `adapter` is the engine's own id, not the name that requests
    use. `removal_told=False`: the removal of these copies is never reported (they are in a store from which others evict too).
    `offloaded`: the event is from a KV connector of an engine whose hashes cover adapter, salt and extra keys, while the event
    may omit them; a known hash keeps its block. `local_hashes`: sent instead of token ids. `sequence_hashes`: packed; sent
    instead of both by a publisher that knows the tokens. `block_bytes`: bytes of KV cache per block, 0 if not in the event.
    `untold_keys`: a human-readable text about keys that distinguish the engine's blocks but are missing from its events; empty
    if none. `located=False`: hashes and parents don't show where in a prompt the blocks are. `removes_held`: the event's form
    belongs to versions that may report the removal of blocks that they still hold. `chunk_removal_told=False`: it is unknown
    whether the removal of blocks larger than the engine's is reported. `maybe_again`: the event may report held blocks again
    instead of new copies.
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
    kind: AttentionKind | None = None
    window_tokens: int | None = None
    lookahead_tokens: int = 0
    lookahead: Sequence[int] = ()
    salt_inherited: bool = True
    offloaded: bool = False
    removal_told: bool = True
    adapter_named: bool = True
    local_hashes: LocalHashes | None = None
    sequence_hashes: bytes = b""
    block_bytes: int = 0
    untold_keys: str = ""
    located: bool = True
    removes_held: bool = False
    chunk_removal_told: bool = True
    maybe_again: bool = False

    @property
    def chain(self) -> str:
        """The chain of the event's blocks."""
        return OWN_CHAIN if self.local_hashes is None else self.local_hashes.chain


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """One physical copy of each block is gone. `last`: it was the last copy in the tier and group, even if more were
    counted."""

    hashes: Sequence[EngineHash]
    tier: Tier = Tier.HBM
    group: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class EngineDropped:
    """All copies of each block are gone, in all tiers. `group=None`: in all groups."""

    hashes: Sequence[EngineHash]
    group: int | None = 0


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Every block in these tiers is gone; by default, in all tiers of the engine's own process."""

    tiers: Sequence[Tier] = PROCESS_TIERS


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The engine's process started: its own memory holds no blocks yet."""


EngineEvent = EngineStarted | EngineStored | EngineRemoved | EngineDropped | EngineCleared


@dataclass(frozen=True, slots=True)
class OpenHeader:
    """The fields of a batch of the open event forms besides its events.

    `event_ids`: the number of each event, with the event's bytes, if the form numbers events. `load`: input of
    `kvatlas.fleet.reported_load.read_load`. `shutdown`: the engine is about to stop.
    """

    engine_id: str | None = None
    model_id: str | None = None
    tokenizer_id: str | None = None
    event_ids: Sequence[tuple[int, bytes]] = ()
    shutdown: bool = False
    load: Mapping[str, Any] | None = None


@dataclass(slots=True)  # not frozen, which would triple the time to create one for each message
class EngineBatch:
    """One step's events. `skipped` describes each event that could not be decoded; the rest of the batch is used.

    `lost`: a skipped event removed unknown blocks, so all blocks known before it are uncertain; `events` are those after it.
    `unknown_at`: the number of events before one of an unknown kind that names no blocks but may have removed some; None if
    there is no such event. `header`: set for the open forms.
    """

    events: Sequence[EngineEvent]
    ts: float = 0.0
    dp_rank: int | None = None
    skipped: Sequence[str] = ()
    lost: bool = False
    header: OpenHeader | None = None
    unknown_at: int | None = None

    def has_lost(self, *, distrust_unknown: bool) -> bool:
        """True if blocks may be gone that no event names. `distrust_unknown`: assume that events of an unknown kind may remove
        any block."""
        return self.lost or (distrust_unknown and self.unknown_at is not None)

    @property
    def known_events(self) -> Sequence[EngineEvent]:
        """The events after the last one that may have removed any block."""
        return self.events[self.unknown_at :] if self.unknown_at else self.events
