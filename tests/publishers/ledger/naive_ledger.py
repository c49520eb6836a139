"""Computes from scratch, each time, what a ledger must announce: the reference for its tests.

Slow and plain: reference counts, unlimited lineages, closure over everything. And `FoldedIndex`, which folds index events as
an index would, and refuses any that changes nothing, or leaves a residency that is not prefix-closed or marks that are not
held.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Cleared, Heads, IndexEvent, Marked, Removed, SnapshotChunk, Stored, Unmarked
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineDropped,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.ledger.engine_hashes.resolver import with_root_salt
from kvatlas_publishers.ledger.marks.marks import SEGMENT
from tests.publishers.naive_reuse import Group, allows

Key = tuple[bytes, bytes]
"""(scope id, packed sequence hash)"""


@dataclass
class NaiveLedger:
    block_size: int
    granularity: int = 1
    counts: Counter[tuple[EngineHash, Tier, int]] = field(default_factory=Counter)
    chains: dict[EngineHash, tuple[bytes, list[bytes]]] = field(
        default_factory=dict
    )  # scope id, hashes from the root on
    parents: dict[EngineHash, EngineHash | None] = field(default_factory=dict)
    unresolved: list[EngineStored] = field(default_factory=list)
    kinds: dict[int, tuple[AttentionKind, int | None]] = field(default_factory=dict)
    named: set[tuple[Tier, int]] = field(default_factory=set)

    def is_full(self, group: int) -> bool:
        if not self.kinds:
            return group == 0
        return group in self.kinds and self.kinds[group][0] is AttentionKind.FULL

    def fold(self, batch: EngineBatch) -> None:
        for event in batch.events:
            if isinstance(event, EngineStored) and event.kind is not None:
                self.kinds[event.group] = event.kind, event.window_tokens
        for event in batch.events:
            if isinstance(event, EngineStored):
                self.named.add((event.tier, event.group))
                self.counts.update((name, event.tier, event.group) for name in event.hashes)
                if self.is_full(event.group) and event.token_ids:
                    self.unresolved.append(event)
                    before = 0
                    while before != len(self.unresolved):  # a child may be announced before its parent
                        before = len(self.unresolved)
                        self.unresolved = [one for one in self.unresolved if not self._learn(one)]
            elif isinstance(event, EngineRemoved):
                for name in event.hashes:
                    if self.counts[name, event.tier, event.group]:
                        self.counts[name, event.tier, event.group] -= 1
            elif isinstance(event, EngineDropped):
                for key in self.counts:
                    if key[0] in event.hashes and event.group in (None, key[2]):
                        self.counts[key] = 0
            elif isinstance(event, EngineCleared):
                for key in self.counts:
                    if key[1] in event.tiers:
                        self.counts[key] = 0

    def _learn(self, event: EngineStored) -> bool:
        keys = event.extra_keys
        if event.parent is None:
            scope_id = Scope("m", "t", event.adapter).scope_id
            above: list[bytes] = []
            keys = with_root_salt(keys, event.salt)
        elif event.parent in self.chains:
            scope_id, above = self.chains[event.parent]
        else:
            return False
        parent = int.from_bytes(above[-1], "little") if above else None
        packed = extend_chain(event.token_ids, self.block_size, parent, keys)
        for i, name in enumerate(event.hashes):
            above = [*above, packed[8 * i : 8 * i + 8]]
            self.chains[name] = (scope_id, above)
            self.parents.setdefault(name, event.hashes[i - 1] if i else event.parent)
        return True

    def resident(self) -> set[tuple[Tier, int, EngineHash]]:
        return {(tier, group, name) for (name, tier, group), count in self.counts.items() if count}

    def is_reachable(self, name: EngineHash) -> bool:
        """True if the hash is held in some tier, as is every hash that leads to it."""
        groups = {tier: [g for (t, g) in self.named if t is tier and self.is_full(g)] for tier in Tier}
        held = any(groups[tier] and all(self.counts[name, tier, group] for group in groups[tier]) for tier in Tier)
        parent = self.parents[name]
        return held and (parent is None or self.is_reachable(parent))

    def usable(self) -> dict[Key, set[Tier]]:
        """Every block that is held with all its ancestors, and the tiers in which it is held, thinned."""
        held: dict[Key, set[Tier]] = {}
        path: dict[Key, list[bytes]] = {}
        for name, (scope_id, chain) in self.chains.items():
            if not self.is_reachable(name):
                continue
            key = (scope_id, chain[-1])
            for tier in Tier:
                groups = [group for (t, group) in self.named if t is tier and self.is_full(group)]
                if groups and all(self.counts[name, tier, group] for group in groups):
                    held.setdefault(key, set()).add(tier)
                    path[key] = chain
        return {
            key: tiers
            for key, tiers in held.items()
            if len(path[key]) % self.granularity == 0 and all((key[0], above) in held for above in path[key])
        }

    def marks(self) -> set[Key]:
        """The usable blocks at which a prompt can be resumed; without groups besides full attention, none.

        A hit is in the device tier, or continues in the others from the end of the longest hit in the device tier above it.
        """
        groups = {
            index: Group(str(kind), window, self.block_size, chunk=2 * self.block_size)
            for index, (kind, window) in self.kinds.items()
            if kind is not AttentionKind.FULL
        }
        if not groups or len(groups) == len(self.kinds):
            return set()
        held: dict[tuple[int, bool], set[Key]] = {
            (index, device): set() for index in groups for device in (True, False)
        }
        path: dict[Key, list[bytes]] = {}
        for name, (scope_id, chain) in self.chains.items():
            path[scope_id, chain[-1]] = chain
            parent = self.parents[name]
            if parent is not None and not self.is_reachable(parent):
                continue  # the engine looks the block up under another hash
            for index in groups:
                for tier in Tier:
                    if self.counts[name, tier, index]:
                        held[index, tier is Tier.HBM].add((scope_id, chain[-1]))
        usable = self.usable()

        def allow(keys: list[Key], *, device: bool, start: int = 0) -> bool:
            return all(
                allows(
                    group,
                    len(keys),
                    self.block_size,
                    [at < start or one in held[index, device] for at, one in enumerate(keys)].__getitem__,
                )
                for index, group in groups.items()
            )

        in_device, marked = set[Key](), set[Key]()
        for key in sorted(usable, key=lambda key: len(path[key])):
            keys = [(key[0], above) for above in path[key]]
            if all(Tier.HBM in usable[one] for one in keys) and allow(keys, device=True):
                in_device.add(key)
                continue
            start = max((at for at, one in enumerate(keys, 1) if one in in_device), default=0)
            if all(usable[one] - {Tier.HBM} for one in keys[start:]) and allow(keys, device=False, start=start):
                marked.add(key)
        return in_device | marked


@dataclass
class FoldedIndex:
    """The content of an index after the events so far. `before` and `index_of`: for announced blocks."""

    granularity: int = 1
    held: dict[Key, set[Tier]] = field(default_factory=dict)
    before: dict[Key, bytes | None] = field(default_factory=dict)
    index_of: dict[Key, int] = field(default_factory=dict)
    marks: set[Key] = field(default_factory=set)
    heads: dict[Key, int] = field(default_factory=dict)

    def check_heads(self) -> None:
        """Check that each head has a bit for each mark of its segment, and no others."""
        expected: dict[Key, int] = {}
        for scope_id, block in self.marks:
            index = self.index_of[scope_id, block]
            head = block
            for _ in range(index % SEGMENT):
                above = self.before[scope_id, head]
                assert above is not None
                head = above
            expected[scope_id, head] = expected.get((scope_id, head), 0) | 1 << index % SEGMENT
        assert self.heads == expected

    def take_marks(self, event: Marked | Unmarked | Heads) -> None:
        """Apply a change of marks, in a snapshot too."""
        keys = [(event.scope_id, event.hashes[at : at + 8]) for at in range(0, len(event.hashes), 8)]
        if isinstance(event, Marked):
            assert self.marks.isdisjoint(keys) and set(keys) <= self.held.keys(), f"{event} marks what is not held"
            self.marks.update(keys)
        elif isinstance(event, Unmarked):
            assert self.marks.issuperset(keys), f"{event} unmarks what is not marked"
            self.marks.difference_update(keys)
        else:
            for i, key in enumerate(keys):
                bits = int.from_bytes(event.bits[8 * i : 8 * i + 8], "big")
                assert self.heads.pop(key, 0) != bits, f"{event} changes nothing"
                if bits:
                    self.heads[key] = bits

    def fold(self, events: Sequence[IndexEvent]) -> None:
        """Apply one batch's events. Checks after every single hash, because a batch may be split into messages anywhere."""
        began_with = set(self.held)
        changes: list[tuple[Key, bool]] = []
        for i, event in enumerate(events):
            if isinstance(event, Cleared):
                assert i == 0 and self.held, "cleared is the first event, and changes something"
                self.held.clear()
                self.marks.clear()
                self.heads.clear()
                began_with = set()
            elif isinstance(event, Stored):
                changes += [(key, True) for key in self._stored(event)]
            elif isinstance(event, Removed):
                changes += [(key, False) for key in self._removed(event)]
            elif isinstance(event, (Marked, Unmarked, Heads)):
                self.take_marks(event)
            else:
                raise AssertionError(f"{event} from a fold")
        phases = []
        for key, stored in changes:
            stays = key in began_with and key in self.held
            phases.append((0 if stored else 1) if stays else (3 if stored else 2))
        assert phases == sorted(phases), f"added, lost, removals, stores: {phases} {events}"

    def chunk(self, chunk: SnapshotChunk) -> None:
        """Apply a part of a snapshot. Parts come in any order, so there is no closure before the end."""
        self._stored(Stored(chunk.scope_id, chunk.tier, chunk.hashes, chunk.parent, chunk.first_index), closed=False)

    def _stored(self, event: Stored, *, closed: bool = True) -> list[Key]:
        keys = [(event.scope_id, event.hashes[at : at + 8]) for at in range(0, len(event.hashes), 8)]
        above = event.parent
        for i, key in enumerate(keys):
            index = event.first_index + i * self.granularity
            assert index % self.granularity == self.granularity - 1
            assert self.before.setdefault(key, above) == above
            assert self.index_of.setdefault(key, index) == index
            assert (above is None) == (index == self.granularity - 1)
            assert not closed or above is None or (key[0], above) in self.held, f"{event} stores behind a hole"
            tiers = self.held.setdefault(key, set())
            assert event.tier not in tiers, f"{event} stores what is held"
            tiers.add(event.tier)
            above = key[1]
        return keys

    def _removed(self, event: Removed) -> list[Key]:
        keys = [(event.scope_id, event.hashes[at : at + 8]) for at in range(0, len(event.hashes), 8)]
        for key in keys:
            assert event.tier in self.held.get(key, ()), f"{event} removes what is not held"
            assert key not in self.marks or len(self.held[key]) > 1, f"{event} removes what is marked"
            self.held[key].discard(event.tier)
            if not self.held[key]:
                del self.held[key]
                behind = [other for other in self.held if other[0] == key[0] and self.before[other] == key[1]]
                assert not behind, f"{event} leaves {behind} behind a hole"
        return keys
