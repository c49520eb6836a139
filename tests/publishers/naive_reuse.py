"""Computes what a vLLM engine reuses from scratch from its published events: the reference for tests.

Slow and plain. It knows nothing of ledgers, sequence hashes or marks: it keeps the engine hashes that each group holds in each
tier, follows a prompt through the engine's own hashes, and tries every position from the deepest down against the rules of
vLLM 0.33 (`HybridKVCacheCoordinator.find_longest_cache_hit`, `single_type_kv_cache_manager`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kvatlas.blocks.media import MediaItem

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
DEVICE = "GPU"

EngineHash = int | bytes
Holds = Callable[[int], bool]
"""True if the group holds the prompt's block with this index."""


@dataclass
class Group:
    """One KV cache group. `kind` and `window` come from its events; no event reports the rest."""

    kind: str = "unknown"
    window: int | None = None
    block_size: int = 0
    chunk: int | None = None
    eagle: bool = False
    full: bool = False


@dataclass
class NaiveReuse:
    """`groups`: by index, as far as settings describe them. `alignment`: hits are multiples of this many blocks."""

    block_size: int
    groups: dict[int, Group] = field(default_factory=dict)
    alignment: int = 1
    held: Counter[tuple[str, int, EngineHash]] = field(default_factory=Counter)
    hash_of: dict[tuple[Any, ...], EngineHash] = field(default_factory=dict)
    adapter_path: str = ""

    @property
    def knows_all_hashes(self) -> bool:
        """True if full attention reports every hash, which it does not if its blocks are larger than the hashed ones."""
        return any(group.block_size == self.block_size for group in self.groups.values() if group.full)

    def fold(self, payload: bytes) -> None:
        for event in msgpack.unpackb(payload, strict_map_key=False)[1]:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self.held[_medium(event), event.get("group_idx") or 0, name] -= 1
            else:
                for key in self.held:
                    if key[0] == DEVICE:
                        self.held[key] = 0

    def _store(self, event: dict[str, Any]) -> None:
        index = event.get("group_idx") or 0
        group = self.groups.setdefault(index, Group())
        if event.get("kv_cache_spec_kind"):
            group.kind = event["kv_cache_spec_kind"]
            group.window = event.get("kv_cache_spec_sliding_window")
            group.block_size = max(group.block_size, event["block_size"])  # partial blocks are smaller
        self.held.update((_medium(event), index, name) for name in event["block_hashes"])
        size, tokens = event["block_size"], event["token_ids"]
        if group.kind not in FULL_KINDS or size != self.block_size or len(tokens) != size * len(event["block_hashes"]):
            return
        above = event.get("parent_block_hash")
        ahead = event.get("lookahead_token_ids") or [[]] * len(event["block_hashes"])
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for i, name in enumerate(event["block_hashes"]):
            own = tuple(tokens[i * size : (i + 1) * size])
            images = tuple(tuple(key) for key in keys[i] or () if not isinstance(key, str))
            self.hash_of[(*self._start(above, event.get("lora_name")), own, tuple(ahead[i]), images)] = name
            above = name

    def _start(self, above: EngineHash | None, adapter: str | None) -> tuple[Any, ...]:
        """The key of a block's start: a first block's hash depends on the adapter and where it was loaded from, a later one's
        on its parent."""
        if above is not None:
            return (above,)
        return (None, adapter, self.adapter_path if adapter else None)

    def hashes(
        self, tokens: Sequence[int], adapter: str | None, lookahead: int = 0, media: Sequence[MediaItem] = ()
    ) -> list[EngineHash]:
        """The engine's hashes of the prompt's full blocks, as far as it ever published them."""
        found: list[EngineHash] = []
        for at in range(0, len(tokens) - self.block_size - lookahead + 1, self.block_size):
            end = at + self.block_size
            start = self._start(found[-1] if found else None, adapter)
            images = tuple(
                (item.id, item.offset - at)
                for item in media
                if item.offset < end + lookahead and item.offset + item.length > at
            )
            name = self.hash_of.get((*start, tuple(tokens[at:end]), tuple(tokens[end : end + lookahead]), images))
            if name is None:
                break
            found.append(name)
        return found

    def reusable(
        self,
        tokens: Sequence[int],
        adapter: str | None = None,
        *,
        lookahead: int = 0,
        media: Sequence[MediaItem] = (),
        tiers: Sequence[str] = (DEVICE,),
    ) -> int:
        """Number of the prompt's tokens that the engine does not compute again, given the blocks in these tiers."""
        hashes = self.hashes(tokens, adapter, lookahead, media)
        holders = {index: self._holder(index, hashes, tiers) for index in self.groups}
        limit = (len(tokens) - 1) // self.block_size
        if len(self.groups) == 1 and any(group.eagle for group in self.groups.values()):
            limit -= 1  # one group drops a reusable block, several groups drop a held one
        for position in range(min(limit, len(hashes)), 0, -1):
            if position % self.alignment == 0 and all(
                allows(group, position, self.block_size, holders[index]) for index, group in self.groups.items()
            ):
                return position * self.block_size
        return 0

    def _holder(self, group: int, hashes: Sequence[EngineHash], tiers: Sequence[str]) -> Holds:
        held = [any(self.held[tier, group, name] > 0 for tier in tiers) for name in hashes]
        return lambda block: block < len(held) and held[block]


def allows(group: Group, position: int, block_size: int, holds_small: Holds) -> bool:
    """True if a prompt's first `position` blocks may be reused, as far as this group is concerned.

    A block of the group may span several blocks of `block_size` tokens; it has the hash of the last of them.
    """
    span = group.block_size // block_size
    if position % span:
        return False
    ahead = 1 if group.eagle else 0  # one more block must be held, and is dropped

    def holds(block: int) -> bool:
        return holds_small((block + 1) * span - 1)

    blocks = position // span
    match group.kind:
        case "full_attention" | "mla_attention" | "sink_full_attention":
            return all(map(holds, range(blocks + ahead)))
        case "sliding_window" | "sliding_window_mla":
            assert group.window is not None
            needed = -(-(group.window - 1) // group.block_size)
            return all(map(holds, range(max(0, blocks - needed), blocks + ahead)))
        case "chunked_local_attention":
            assert group.chunk is not None, "the chunk size is a setting"
            start = position * block_size // group.chunk * group.chunk
            return all(map(holds, range(start // group.block_size, blocks)))
        case "mamba":
            return holds(blocks - 1)
    raise AssertionError(f"group of kind {group.kind}")


def _medium(event: dict[str, Any]) -> str:
    return event.get("medium") or DEVICE
