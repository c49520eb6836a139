"""What an engine reports about its cache, in a form that no longer depends on the engine.

The adapters in `publishers/engines` decode an engine's bytes into these events, and the ledger reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.blocks.attention_groups import AttentionKind
from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import OWN_CHAIN

EngineHash = int | bytes
"""A block's name in one engine: an integer (vLLM unsigned, SGLang signed) or raw digest bytes."""


PROCESS_TIERS = (Tier.HBM, Tier.CPU_DRAM)
"""The tiers in the memory of the engine's own process. Disks and stores outlive it."""


@dataclass(frozen=True, slots=True)
class LocalHashes:
    """Blocks whose local hashes are known while their tokens are not: one for each hash of the event.

    `chain`: see `kvatlas.identity.Scope`. `root`: the hash before a prompt's first block (of external chains).
    """

    hashes: Sequence[int]
    chain: str = OWN_CHAIN
    root: int | None = None


@dataclass(slots=True)  # not frozen: to make one would take three times as long, for each message
class EngineStored:
    """Blocks were stored; one event for each physical copy.

    `token_ids` holds `len(hashes) * block_size` ids, or none for an offload placeholder, which names blocks already known
    by their hash. `extra_keys` has one entry a block, or is None; it contains neither the adapter nor the salt (canonical
    form: `kvatlas.blocks.hashing`). `kind` and `window_tokens` describe the group's attention, None if the event does not tell
    them. `lookahead_tokens`: how many tokens behind a block its hash covers; `lookahead`: those behind the last block.
    `salt_inherited`: an event with a parent and without a salt has its parent's salt (vLLM sends the salt with the first block
    only; SGLang with every event of a chain). `adapter_named` False: `adapter` is an id of the engine's own, not the name that
    requests have. `removal_told` False: nobody says when these copies are gone (a store that others evict from, too).
    `offloaded`: told by a KV connector of an engine whose hashes cover adapter, salt and extra keys, while the event may leave
    them out: a hash that is known keeps its block. `local_hashes`: told instead of token ids. `sequence_hashes`: packed, told
    instead of both by a publisher that computed them where the tokens are. `block_bytes`: of KV cache in a block, 0 if the
    event does not tell them. `untold_keys`: what the engine keeps blocks apart by and its events don't say, for people; empty
    if nothing. `located` False: from its hashes and parents can't be known where in a prompt the blocks are. `removes_held`:
    the form is one of versions that may announce the removal of blocks that they still hold. `chunk_removal_told` False:
    it is not known whether the removal of blocks larger than the engine's is reported. `maybe_again`: it may report blocks
    that are held already, instead of new copies.
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
        """The chain that its blocks are of."""
        return OWN_CHAIN if self.local_hashes is None else self.local_hashes.chain


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """One physical copy of each block is gone; `last`: the last one of the tier and group, however many were counted."""

    hashes: Sequence[EngineHash]
    tier: Tier = Tier.HBM
    group: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class EngineDropped:
    """All copies of each block are gone, in whatever tiers; `group` None: of all groups."""

    hashes: Sequence[EngineHash]
    group: int | None = 0


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Every block of these tiers is gone; by default of all that the engine's own process has."""

    tiers: Sequence[Tier] = PROCESS_TIERS


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The engine's process begins: its own memory holds nothing yet."""


EngineEvent = EngineStarted | EngineStored | EngineRemoved | EngineDropped | EngineCleared


@dataclass(frozen=True, slots=True)
class OpenHeader:
    """What a batch of the open event forms says besides its events.

    `event_ids`: the number of each event, with its bytes, if the form numbers events. `load`: as `read_load` of
    `kvatlas.fleet.reported_load` takes it. `shutdown`: the engine is about to stop.
    """

    engine_id: str | None = None
    model_id: str | None = None
    tokenizer_id: str | None = None
    event_ids: Sequence[tuple[int, bytes]] = ()
    shutdown: bool = False
    load: Mapping[str, Any] | None = None


@dataclass(slots=True)  # not frozen: to make one would take three times as long, for each message
class EngineBatch:
    """One step's events. `skipped` describes each event that could not be decoded; the rest of the batch is used.

    `lost`: a skipped event removed blocks, and which is not known: neither is what was held before it. `events` are those that
    came after it. `unknown_at`: how many of the events came before one of a kind that is unknown here and names no blocks,
    which may have removed some; None without one. `header`: of the open forms.
    """

    events: Sequence[EngineEvent]
    ts: float = 0.0
    dp_rank: int | None = None
    skipped: Sequence[str] = ()
    lost: bool = False
    header: OpenHeader | None = None
    unknown_at: int | None = None

    def has_lost(self, *, distrust_unknown: bool) -> bool:
        """May blocks be gone that no event names? `distrust_unknown`: an event of an unknown kind may have removed any."""
        return self.lost or (distrust_unknown and self.unknown_at is not None)

    @property
    def known_events(self) -> Sequence[EngineEvent]:
        """The events behind the last that may have removed any blocks."""
        return self.events[self.unknown_at :] if self.unknown_at else self.events
