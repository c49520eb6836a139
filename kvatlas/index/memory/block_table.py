"""The blocks in one shard of the memory index, and their holders."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from struct import iter_unpack
from time import monotonic
from typing import NamedTuple

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import HOLDER_ENTRY_BYTES, ShardRuns
from kvatlas.blocks.tiers import Tier, are_tiers, tiers_of
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.gallop import STRIDE, gallop, walk
from kvatlas.index.holder_entries import (
    MAX_HOLDER,
    NUMBER_BYTES,
    depths_by_number,
    entries_of,
    number_bytes,
    with_entry,
    without_entry,
    without_holder,
)
from kvatlas.index.mark_lookup import HIGHEST_POSITION, without_sized
from kvatlas.index.memory.mark_table import MarkTable, replace_value
from kvatlas.index.memory.pins import Pins
from kvatlas.index.run_guesses import RunGuesses


@dataclass(slots=True)
class Holder:
    """The blocks of one incarnation. `touched`: the scopes that it has used, and the sizes of its blocks there. `blocks_in`
    counts blocks by scope and tier. `moments`: the block-seconds to subtract from its current blocks × the time since it became
    active."""

    worker_id: str
    digest: Digest = field(default_factory=Digest)
    touched: dict[bytes, BlockSizes] = field(default_factory=dict)
    blocks_in: Counter[tuple[bytes, Tier]] = field(default_factory=Counter)
    active_since_s: float | None = None
    retired_s: float | None = None
    moments: dict[tuple[bytes, Tier], float] = field(default_factory=dict)

    def span_s(self, now_s: float) -> float:
        """For how many seconds it has been active, or was active before it was retired."""
        if self.active_since_s is None:
            return 0.0
        return (now_s if self.retired_s is None else self.retired_s) - self.active_since_s

    def count(self, place: tuple[bytes, Tier], blocks: int, now_s: float) -> None:
        """Count this many more blocks of a scope in a tier."""
        self.blocks_in[place] += blocks
        if span_s := self.span_s(now_s):
            self.moments[place] = self.moments.get(place, 0.0) + blocks * span_s

    def byte_seconds(self, place: tuple[bytes, Tier], now_s: float) -> float:
        """See `kvatlas.index.usage`."""
        scope_id, tier = place
        block_bytes = self.touched.get(scope_id, BlockSizes()).bytes_in(tier)
        return (self.blocks_in[place] * self.span_s(now_s) - self.moments.get(place, 0.0)) * block_bytes

    def touch(self, scope_id: bytes, sizes: BlockSizes) -> None:
        """Note that the holder uses this scope, with blocks of these sizes."""
        known = self.touched.get(scope_id)
        self.touched[scope_id] = sizes if known is None else known.updated(sizes)


@dataclass(slots=True)
class HolderCount:
    """The blocks of a holder, counted from the blocks themselves. `malformed`: one of its entries has flags that are not
    tiers."""

    digest: Digest = field(default_factory=Digest)
    malformed: bool = False

    def add(self, scope_id: bytes, key: bytes, flags: int) -> None:
        for tier in tiers_of(flags):
            self.digest.add(scope_id, tier, key)
        self.malformed = self.malformed or not are_tiers(flags)


class BlockTable:
    """The holders values by scope and block, the side index, and the holders: their numbers, states and digests.

    A model of `functions/_blocks.lua` and `functions/_holders.lua`.
    """

    def __init__(self, *, side_index: bool = True, clock: Callable[[], float] = monotonic) -> None:
        self.side_index = side_index
        self.clock = clock
        self.spent: dict[tuple[bytes, Tier], float] = {}
        """Byte-seconds of holders that no longer have any block of a scope."""
        self.blocks: dict[bytes, dict[bytes, bytes]] = {}
        self.parents: dict[bytes, dict[bytes, bytes]] = {}
        self.children: dict[bytes, dict[bytes, list[bytes]]] = {}
        self.marks = MarkTable()
        self.pins = Pins()
        self.holders: dict[int, Holder] = {}
        self.active: dict[int, str] = {}
        self.retired: dict[int, None] = {}
        self._guesses = RunGuesses()
        self._free: list[int] = []
        self.last_number = 0
        self._swept: list[int] = []
        """The retired holders that the current round of sweeping removes."""
        self._unswept: list[_Unswept] = []
        """What the round has not looked at yet."""

    # ------------------------------------------------------------ holders

    def allocate(self, worker_id: str) -> int:
        """Return a new holder's number."""
        if self.last_number < MAX_HOLDER:
            self.last_number += 1
            holder = self.last_number
        else:
            holder = self._free.pop(0)  # the one that was freed first
        self.holders[holder] = Holder(worker_id)
        return holder

    def adopt(self, holder: int, worker_id: str, touched: Mapping[bytes, BlockSizes], *, active: bool) -> None:
        """Take over a holder from another index, with its number. `touched`: see `Holder`."""
        self.holders[holder] = Holder(worker_id, touched=dict(touched))
        self.last_number = max(self.last_number, holder)
        if active:
            self.activate(holder)

    def activate(self, holder: int) -> None:
        """Make the holder answer from now on."""
        self.active[holder] = self.holders[holder].worker_id
        self.holders[holder].active_since_s = self.clock()

    def retire(self, holder: int) -> None:
        """Make the holder stop answering; a number below 0 is ignored. O(1), because `sweep` frees the memory."""
        if holder >= 0:
            self.active.pop(holder, None)
            self.retired[holder] = None
            self.holders[holder].retired_s = self.clock()

    def sweep(self, budget: int) -> int:
        """Remove retired holders from about `budget` values. Returns the number of retired holders that are left."""
        if not self._swept and self.retired:
            self._swept = list(self.retired)
            touched = {scope_id for holder in self._swept for scope_id in self.holders[holder].touched}
            self._unswept = [part for scope_id in touched for part in self._parts_of(scope_id)]
        numbers = [number_bytes(holder) for holder in self._swept]
        while budget > 0 and self._unswept:
            values, without, replace, keys = self._unswept[-1]
            known: dict[bytes, bytes] = {}  # values repeat
            for key in keys[-budget:]:
                if (value := values.get(key)) is None:
                    continue
                if (rest := known.get(value)) is None:
                    rest = value
                    for number in numbers:
                        rest = without(rest, number)
                    known[value] = rest
                if rest is not value:
                    replace(key, rest)
            looked_at = min(budget, len(keys))
            del keys[-budget:]
            budget -= looked_at
            if not keys:
                self._unswept.pop()
        if self._swept and not self._unswept:
            for holder in self._swept:
                self._settle(self.holders[holder], None)
                self.marks.marked.pop(number_bytes(holder), None)
                self.pins.forget(holder)
                del self.retired[holder], self.holders[holder]
                self._free.append(holder)
            self._swept = []
        return len(self.retired)

    def _parts_of(self, scope_id: bytes) -> Iterator["_Unswept"]:
        """The values of a scope that a sweep has to look at."""
        if blocks := self.blocks.get(scope_id):
            yield _Unswept(blocks, without_holder, lambda key, rest: self._replace(scope_id, key, rest), list(blocks))
        for by_scope, size in self.marks.tables:
            if values := by_scope.get(scope_id):
                yield _Unswept(
                    values, partial(without_sized, entry_bytes=size), partial(replace_value, values), list(values)
                )

    # ------------------------------------------------------------ blocks

    def load(self, scope_id: bytes, values: Mapping[bytes, bytes], known: dict[bytes, bytes]) -> None:
        """Take over blocks from another index, each once. Entries of holders that are unknown here are dropped. `known`: a
        cache of the values that result; all calls for one copy share it, so that equal values are the same object."""
        blocks = self.blocks.setdefault(scope_id, {})
        by_entry: dict[bytes, list[bytes]] = {}
        for value, keys in _by_value(values, blocks).items():
            if (kept := known.get(value)) is None:
                entries = (value[at : at + HOLDER_ENTRY_BYTES] for at in range(0, len(value), HOLDER_ENTRY_BYTES))
                kept = b"".join(one for one in entries if int.from_bytes(one[:NUMBER_BYTES], "big") in self.holders)
                known[value] = kept
            if kept:
                blocks.update(dict.fromkeys(keys, kept))
                for at in range(0, len(kept), HOLDER_ENTRY_BYTES):
                    by_entry.setdefault(kept[at : at + HOLDER_ENTRY_BYTES], []).extend(keys)
        for entry, keys in by_entry.items():
            holder, flags = int.from_bytes(entry[:NUMBER_BYTES], "big"), entry[NUMBER_BYTES]
            for tier in tiers_of(flags):
                self._count(holder, scope_id, tier, keys)

    def store(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes, counts: ApplyCounts) -> None:
        number, blocks = number_bytes(holder), self.blocks.setdefault(scope_id, {})
        keys = split(hashes)
        olds = [value or b"" for value in map(blocks.get, keys)]
        for old in set(olds):
            new = with_entry(old, number, tier.flag)
            if new == old:
                continue
            changed = _keys_of(keys, olds, old)
            blocks.update(dict.fromkeys(changed, new))
            self._count(holder, scope_id, tier, changed)
            counts.stored += len(changed)

    def remove(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes, counts: ApplyCounts) -> None:
        number, blocks = number_bytes(holder), self.blocks.get(scope_id, {})
        keys = split(hashes)
        olds = [value or b"" for value in map(blocks.get, keys)]
        for old in set(olds):
            new = without_entry(old, number, tier.flag)
            if new == old:
                continue
            changed = _keys_of(keys, olds, old)
            if new:
                blocks.update(dict.fromkeys(changed, new))
            else:
                for key in changed:
                    self._replace(scope_id, key, new)
            self._count(holder, scope_id, tier, changed, -1)
            counts.removed += len(changed)

    def _count(self, holder: int, scope_id: bytes, tier: Tier, keys: Sequence[bytes], sign: int = 1) -> None:
        one = self.holders[holder]
        one.digest.add(scope_id, tier, b"".join(keys), sign)
        one.count((scope_id, tier), sign * len(keys), self.clock())

    def _settle(self, holder: Holder, scope_id: bytes | None) -> None:
        """Add to `spent` the usage of a holder that is being freed, or that no longer has any block of a scope."""
        now_s = self.clock()
        for place in [place for place in holder.blocks_in if scope_id in (None, place[0])]:
            self.spent[place] = self.spent.get(place, 0.0) + holder.byte_seconds(place, now_s)
            del holder.blocks_in[place]
            holder.moments.pop(place, None)

    def usage(self) -> list[tuple[bytes, Tier, float]]:
        """(scope id, tier, byte-seconds) for all holders, including retired ones, and for `spent`."""
        now_s = self.clock()
        held = [
            (*place, one.byte_seconds(place, now_s)) for one in self.holders.values() for place in list(one.blocks_in)
        ]
        return [*held, *((*place, amount) for place, amount in self.spent.items())]

    def link(self, scope_id: bytes, parent: bytes, hashes: bytes) -> None:
        """If the side index is enabled, record in it that these blocks follow each other and that the first one follows
        `parent` (b"": it is a root)."""
        if not self.side_index:
            return
        parents, children = self.parents.setdefault(scope_id, {}), self.children.setdefault(scope_id, {})
        for key in split(hashes):
            if key not in parents:
                parents[key] = parent
                children.setdefault(parent, []).append(key)
            parent = key

    def forget_empty_scopes(self) -> Collection[bytes]:
        """Drop everything about scopes that have no blocks. Returns the scopes that are left."""
        for scope_id in [scope_id for scope_id, blocks in self.blocks.items() if not blocks]:
            for kept in (self.blocks, self.parents, self.children, self.marks.marks, self.marks.heads):
                kept.pop(scope_id, None)
            for holder in self.holders.values():
                self._settle(holder, scope_id)
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
        """Runs of equal holders, and where those of them that have marks can resume the chain; stride 0 walks every block."""
        blocks = self.blocks.get(scope_id)
        if not blocks:
            return ShardRuns((), (), {})
        if stride:
            guess = self._guesses.find(hashes)
            values, lengths = gallop(blocks.get, hashes, stride, guess)
            self._guesses.keep(hashes, lengths, guess)
        else:
            values, lengths = walk(blocks.get, hashes)
        if not values or not self.marks.marked:
            return ShardRuns(values, lengths, self.active)
        depths = depths_by_number(values, lengths)
        positions = self.marks.positions(scope_id, hashes, depths, limit, first_index, walk=not stride)
        return ShardRuns(values, lengths, self.active, positions)

    def entries(self, scope_id: bytes, key: bytes) -> Iterator[tuple[int, int]]:
        """(holder, flags) for each active holder of one block."""
        for number, flags in entries_of(self.blocks.get(scope_id, {}).get(key, b"")):
            holder = int.from_bytes(number, "big")
            if holder in self.active:
                yield holder, flags

    # ------------------------------------------------------------ recounts

    def recount(self) -> tuple[dict[int, HolderCount], int]:
        """The content of every active holder, counted from the blocks, and how many entries with unknown holder numbers were
        removed.

        A scope in which blocks of a holder were found counts as used by that holder: a sweep must look there.
        """
        counted = {holder: HolderCount() for holder in self.active}
        strays = 0
        for scope_id, blocks in self.blocks.items():
            for key, value in list(blocks.items()):
                for number, flags in entries_of(value):
                    holder = int.from_bytes(number, "big")
                    if holder in counted:
                        self.holders[holder].touched.setdefault(scope_id, BlockSizes())
                        counted[holder].add(scope_id, key, flags)
                    elif holder not in self.holders:
                        strays += 1
                        self._replace(scope_id, key, without_holder(blocks[key], number))
        return counted, strays

    def is_sound(self, holder: int, count: HolderCount) -> bool:
        """True if every entry has at least one tier and no other flags, and the marks match their digest."""
        if count.malformed:
            return False
        marks = self.marks.marked.get(number_bytes(holder))
        found = self.marks.recount(number_bytes(holder))
        return found.words == (marks.digest if marks is not None else MarkDigest()).words


class _Unswept(NamedTuple):
    """Values that a sweep has not looked at yet, under `keys`. `without` removes a holder's entry from a value; `replace`
    stores what is left."""

    values: Mapping[bytes, bytes]
    without: Callable[[bytes, bytes], bytes]
    replace: Callable[[bytes, bytes], None]
    keys: list[bytes]


def split(packed: bytes) -> list[bytes]:
    """The individual hashes in packed ones, in order and without repeats."""
    return list(dict.fromkeys(chain.from_iterable(iter_unpack(f"{HASH_BYTES}s", packed))))


def _by_value(values: Mapping[bytes, bytes], besides: Mapping[bytes, bytes]) -> dict[bytes, list[bytes]]:
    """Keys grouped by their value, except those in `besides`."""
    found: dict[bytes, list[bytes]] = {}
    for key, value in values.items():
        if key not in besides:
            found.setdefault(value, []).append(key)
    return found


def _keys_of(keys: list[bytes], olds: list[bytes], old: bytes) -> list[bytes]:
    """The keys whose value is `old`; usually that is all of them."""
    if olds.count(old) == len(olds):
        return keys
    return [key for key, value in zip(keys, olds, strict=True) if value == old]
