"""One shard's blocks in the memory index, and the holders that have them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvatlas.blocks.digest import Digest, FlagDigest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import ShardRuns
from kvatlas.blocks.tiers import TIER_MASK, Tier, tiers_of
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.gallop import STRIDE, gallop, walk
from kvatlas.index.holder_entries import (
    MAX_HOLDER,
    depths_by_number,
    entries_of,
    find_entry,
    flags_in,
    number_bytes,
    with_entry,
    without_entry,
    without_holder,
)
from kvatlas.index.mark_lookup import HIGHEST_POSITION
from kvatlas.index.memory.mark_table import MarkTable


@dataclass(slots=True)
class Holder:
    """One incarnation's blocks. `touched` maps each scope used to (block size, block bytes); `flags` counts the flags besides
    tiers."""

    worker_id: str
    digest: Digest = field(default_factory=Digest)
    touched: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    flags: FlagDigest = field(default_factory=FlagDigest)


@dataclass(slots=True)
class HolderCount:
    """A holder's blocks, counted from the blocks themselves. `untiered`: one of its entries is in no tier."""

    digest: Digest = field(default_factory=Digest)
    flags: FlagDigest = field(default_factory=FlagDigest)
    untiered: bool = False

    def add(self, scope_id: bytes, key: bytes, flags: int) -> None:
        for tier in tiers_of(flags):
            self.digest.add(scope_id, tier, key)
        self.flags.add(scope_id, flags, key)
        self.untiered = self.untiered or not flags & TIER_MASK


class BlockTable:
    """Holders values by scope and block, the side index, and the holders: their numbers, states and digests.

    A model of `functions/_blocks.lua` and `functions/_holders.lua`.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, dict[bytes, bytes]] = {}
        self.parents: dict[bytes, dict[bytes, bytes]] = {}
        self.children: dict[bytes, dict[bytes, list[bytes]]] = {}
        self.marks = MarkTable()
        self.holders: dict[int, Holder] = {}
        self.active: dict[int, str] = {}
        self.retired: dict[int, None] = {}
        self._free: list[int] = []
        self._last_number = 0

    # ------------------------------------------------------------ holders

    def allocate(self, worker_id: str) -> int:
        """A new holder's number."""
        if self._last_number < MAX_HOLDER:
            self._last_number += 1
            holder = self._last_number
        else:
            holder = self._free.pop(0)  # first freed first
        self.holders[holder] = Holder(worker_id)
        return holder

    def activate(self, holder: int) -> None:
        """The holder answers from now on."""
        self.active[holder] = self.holders[holder].worker_id

    def retire(self, holder: int) -> None:
        """The holder answers no more; below 0 there is none. O(1), `sweep` gives its memory back."""
        if holder >= 0:
            self.active.pop(holder, None)
            self.retired[holder] = None

    def sweep(self) -> int:
        """Take every retired holder out of all blocks. Returns how many are left: 0."""
        for holder in list(self.retired):
            number = number_bytes(holder)
            for scope_id in self.holders[holder].touched:
                for key, value in list(self.blocks.get(scope_id, {}).items()):
                    for tier in tiers_of(flags_in(value, number)):
                        self.holders[holder].digest.add(scope_id, tier, key, -1)
                    rest = without_holder(value, number)
                    if rest != value:
                        self._replace(scope_id, key, rest)
            self.marks.forget(number)
            del self.retired[holder], self.holders[holder]
            self._free.append(holder)
        return len(self.retired)

    # ------------------------------------------------------------ blocks

    def store(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes, flags: int, counts: ApplyCounts) -> None:
        """Add blocks to a holder, in a tier."""
        number, blocks = number_bytes(holder), self.blocks.setdefault(scope_id, {})
        changed: list[bytes] = []
        for key in split(hashes):
            old = blocks.get(key, b"")
            new = with_entry(old, number, tier.flag, flags)
            if new != old:
                blocks[key] = new
                counts.bytes_written += len(key) + len(new)
                if not flags_in(old, number) & tier.flag:
                    changed.append(key)
                self.holders[holder].flags.add(scope_id, flags & ~flags_in(old, number), key)
        counts.stored += len(changed)
        self.holders[holder].digest.add(scope_id, tier, b"".join(changed))

    def remove(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes, counts: ApplyCounts) -> None:
        """Take blocks from a holder, in a tier."""
        number, blocks = number_bytes(holder), self.blocks.get(scope_id, {})
        changed: list[bytes] = []
        for key in split(hashes):
            old = blocks.get(key, b"")
            new = without_entry(old, number, tier.flag)
            if new == old:
                continue
            changed.append(key)
            self.holders[holder].flags.add(scope_id, flags_in(old, number) & ~flags_in(new, number), key, -1)
            self._replace(scope_id, key, new)
            if new:
                counts.bytes_written += len(key) + len(new)
        counts.removed += len(changed)
        self.holders[holder].digest.add(scope_id, tier, b"".join(changed), -1)

    def link(self, scope_id: bytes, parent: bytes, hashes: bytes) -> None:
        """Note in the side index that these blocks follow each other, the first one `parent` (b"": a root)."""
        parents, children = self.parents.setdefault(scope_id, {}), self.children.setdefault(scope_id, {})
        for key in split(hashes):
            if key not in parents:
                parents[key] = parent
                children.setdefault(parent, []).append(key)
            parent = key

    def forget_empty_scopes(self) -> Collection[bytes]:
        """Keep nothing of scopes without a block. Returns the other scopes."""
        for scope_id in [scope_id for scope_id, blocks in self.blocks.items() if not blocks]:
            for kept in (self.blocks, self.parents, self.children, self.marks.marks, self.marks.heads):
                kept.pop(scope_id, None)
            for holder in self.holders.values():
                holder.touched.pop(scope_id, None)
        return self.blocks.keys()

    def _replace(self, scope_id: bytes, key: bytes, value: bytes) -> None:
        if value:
            self.blocks[scope_id][key] = value
            return
        del self.blocks[scope_id][key]
        parent = self.parents.get(scope_id, {}).pop(key, None)
        if parent is not None:
            siblings = self.children[scope_id][parent]
            siblings.remove(key)
            if not siblings:
                del self.children[scope_id][parent]

    # ------------------------------------------------------------ questions

    def overlap(
        self,
        scope_id: bytes,
        hashes: bytes,
        stride: int = STRIDE,
        *,
        first_index: int = 0,
        limit: int = HIGHEST_POSITION,
    ) -> ShardRuns:
        """Runs of equal holders, and where the marked ones of them can resume the chain; stride 0 walks every block."""
        blocks = self.blocks.get(scope_id)
        if not blocks:
            return ShardRuns((), (), {})
        values, lengths = gallop(blocks.get, hashes, stride) if stride else walk(blocks.get, hashes)
        if not values or not self.marks.marked:
            return ShardRuns(values, lengths, self.active)
        depths = depths_by_number(values, lengths)
        positions = self.marks.positions(scope_id, hashes, depths, limit, first_index, walk=not stride)
        return ShardRuns(values, lengths, self.active, positions)

    def entries(self, scope_id: bytes, key: bytes) -> Iterator[tuple[int, int]]:
        """(holder, flags) of the active holders of one block."""
        for number, flags in entries_of(self.blocks.get(scope_id, {}).get(key, b"")):
            holder = int.from_bytes(number, "big")
            if holder in self.active:
                yield holder, flags

    # ------------------------------------------------------------ recounts

    def recount(self) -> tuple[dict[int, HolderCount], int]:
        """What every active holder has, counted from the blocks, and how many entries of unknown numbers were taken out.

        A scope in which a holder's blocks were found counts as used by it: a sweep must look there.
        """
        counted = {holder: HolderCount() for holder in self.active}
        strays = 0
        for scope_id, blocks in self.blocks.items():
            for key, value in list(blocks.items()):
                for number, flags in entries_of(value):
                    holder = int.from_bytes(number, "big")
                    if holder in counted:
                        self.holders[holder].touched.setdefault(scope_id, (0, 0))
                        counted[holder].add(scope_id, key, flags)
                    elif holder not in self.holders:
                        strays += 1
                        self._replace(scope_id, key, without_holder(blocks[key], number))
        return counted, strays

    def is_sound(self, holder: int, count: HolderCount) -> bool:
        """Is each entry in some tier, with the flags that messages set? Are the marks those of their digest?"""
        if count.untiered or count.flags.words != self.holders[holder].flags.words:
            return False
        marks = self.marks.marked.get(number_bytes(holder))
        found = self.marks.recount(number_bytes(holder))
        return found.words == (marks.digest if marks is not None else MarkDigest()).words

    def recount_one(self, holder: int) -> HolderCount:
        """What one holder has, counted from the blocks."""
        number, count = number_bytes(holder), HolderCount()
        for scope_id, blocks in self.blocks.items():
            for key, value in blocks.items():
                if find_entry(value, number)[1]:
                    count.add(scope_id, key, flags_in(value, number))
        return count


def split(packed: bytes) -> list[bytes]:
    """Packed hashes as single ones, each once, in order."""
    return list(dict.fromkeys(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)))
