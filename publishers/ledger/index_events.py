"""Turns changes of usable residency into index events, ordered so that residency is prefix-closed after each event.

The order within a batch: added tiers, lost tiers, removals child first, stores parent first. With granularity g, only blocks
with index % g == g-1 are published; `parent` is then the previous published block.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES, thin, unpack_hashes
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.events import Cleared, IndexEvent, Removed, SnapshotChunk, Stored
from kvatlas_publishers.ledger.block import Namespace, Stretch, reversed_hashes
from kvatlas_publishers.ledger.prefix_closure import UsableChange

CHUNK_BLOCKS = 4096
"""Maximum number of blocks in a snapshot chunk, which thus holds at most 32 KiB of hashes."""

_TIERS: tuple[tuple[Tier, ...], ...] = tuple(tiers_of(flags) for flags in range(1 << len(Tier)))

_WithFlags = tuple[Stretch, int]
_Run = tuple[Namespace, int, bytes, bytes | None, int]
"""Consecutive blocks of one chain: namespace, tier flags, packed hashes, packed parent or None, index of the first."""


class IndexEvents:
    """Creates the events of one worker. `digest` and `blocks` cover everything published now."""

    __slots__ = ("_last", "_step", "blocks", "digest")

    def __init__(self, granularity: int) -> None:
        self._step = granularity
        self._last = granularity - 1
        self.digest = Digest()
        self.blocks = 0

    def announced(self, stretch: Stretch) -> Iterator[tuple[int, int]]:
        """The published blocks: (number in the stretch, sequence hash)."""
        if stretch.usable > 0:
            for at, value in enumerate(unpack_hashes(stretch.hashes)):
                if (stretch.index + at) % self._step == self._last:
                    yield at, value

    def _hashes(self, stretch: Stretch) -> bytes:
        """Hashes of the blocks that are published if usable."""
        return stretch.hashes if self._step == 1 else thin(stretch.hashes, self._step, stretch.index)

    # ---------------------------------------------------------------- changes

    def make(self, change: UsableChange, cleared: bool) -> list[IndexEvent]:
        """Create the events for a change. `cleared`: the engine has cleared a tier, so one event may remove
        everything."""
        events: list[IndexEvent] = []
        removed = change.removed
        if self._step > 1:
            removed = [(stretch, flags) for stretch, flags in removed if self._hashes(stretch)]
        if (
            cleared
            and removed
            and sum(len(self._hashes(stretch)) for stretch, _ in removed) == HASH_BYTES * self.blocks
        ):
            events.append(Cleared())
            self.digest = Digest()
            self.blocks = 0
        else:
            if change.moved:
                self._add_moved(change.moved, events)
            if removed:
                self._add_removed(removed, events)
        for namespace, flags, hashes, parent, first_index in self._runs(change.added):
            self.blocks += len(hashes) // HASH_BYTES
            self._add_stored(namespace.scope_id, flags, hashes, parent, first_index, events)
        return events

    def _add_stored(
        self,
        scope_id: bytes,
        flags: int,
        hashes: bytes,
        parent: bytes | None,
        first_index: int,
        events: list[IndexEvent],
    ) -> None:
        """Add one event for each tier of `flags`."""
        for tier in _TIERS[flags]:
            events.append(Stored(scope_id, tier, hashes, parent, first_index))
            self.digest.add(scope_id, tier, hashes)

    def _add_lost(self, scope_id: bytes, flags: int, hashes: bytes, events: list[IndexEvent]) -> None:
        """Add one event for each tier of `flags`."""
        for tier in _TIERS[flags]:
            events.append(Removed(scope_id, tier, hashes))
            self.digest.add(scope_id, tier, hashes, -1)

    def _add_moved(self, moved: list[_WithFlags], events: list[IndexEvent]) -> None:
        """Add the events of blocks that stay but changed tiers: first all added tiers, then all lost ones."""
        announced = [(stretch, before) for stretch, before in moved if self._hashes(stretch)]
        announced.sort(key=_depth)
        for tier in Tier:
            added = {stretch: None for stretch, before in announced if stretch.usable & ~before & tier.flag}
            for namespace, _, hashes, parent, first_index in self._runs_of_moved(added):
                self._add_stored(namespace.scope_id, tier.flag, hashes, parent, first_index, events)
        for tier in Tier:
            lost = [stretch for stretch, before in reversed(announced) if before & ~stretch.usable & tier.flag]
            for scope_id, hashes in self._child_first(lost):
                self._add_lost(scope_id, tier.flag, hashes, events)

    def _add_removed(self, removed: list[_WithFlags], events: list[IndexEvent]) -> None:
        """Add one event per scope and set of tiers, unless a block of one set is an ancestor of a block of another; then as
        many as the depths require. A block in several tiers is gone with the last of its tiers' events."""
        if len(removed) > 1:
            removed.sort(key=_depth, reverse=True)
        _, first_flags = removed[0]
        if any(flags != first_flags for _, flags in removed):
            # Deeper blocks first, in any tier. Blocks of equal depth are never ancestors of each other.
            removed.sort(key=_flags)
            removed.sort(key=_depth, reverse=True)
            self._add_removed_of_several_tiers(removed, events)
            return
        for scope_id, hashes in self._child_first(stretch for stretch, _ in removed):
            self.blocks -= len(hashes) // HASH_BYTES
            self._add_lost(scope_id, first_flags, hashes, events)

    def _add_removed_of_several_tiers(self, removed: list[_WithFlags], events: list[IndexEvent]) -> None:
        by_scope: dict[bytes, list[_WithFlags]] = {}
        for stretch, flags in removed:
            by_scope.setdefault(stretch.namespace.scope_id, []).append((stretch, flags))
        for some in by_scope.values():
            for flags, same in groupby(some, key=_flags):
                for scope_id, hashes in self._child_first(stretch for stretch, _ in same):
                    self.blocks -= len(hashes) // HASH_BYTES
                    self._add_lost(scope_id, flags, hashes, events)

    def _child_first(self, stretches: Iterable[Stretch]) -> Iterable[tuple[bytes, bytes]]:
        """(scope id, packed hashes) of each scope; `stretches`: deeper ones first."""
        by_scope: dict[bytes, bytes] = {}
        for stretch in stretches:
            scope_id = stretch.namespace.scope_id
            by_scope[scope_id] = by_scope.get(scope_id, b"") + reversed_hashes(self._hashes(stretch))
        return by_scope.items()

    # ---------------------------------------------------------------- runs of a chain

    def _runs(self, added: Iterable[Stretch]) -> Iterator[_Run]:
        """Runs of consecutive blocks of one chain with the same tiers, every `granularity`-th of them. `added`: parents
        first."""
        run: list[Stretch] = []
        for stretch in added:
            if run and (stretch.parent is not run[-1] or stretch.usable != run[-1].usable):
                yield from self._run(run, run[-1].usable)
                run = []
            run.append(stretch)
        if run:
            yield from self._run(run, run[-1].usable)

    def _runs_of_moved(self, moved: dict[Stretch, None]) -> Iterator[_Run]:
        """Runs of published blocks that are sorted by depth with chains mixed. Parents are followed to find each chain."""
        after: dict[Stretch, Stretch] = {}
        heads: list[Stretch] = []
        for stretch in moved:
            before = _holder_of(stretch.parent, self._first_index(stretch) - self._step)
            if before is not None and before in moved and before not in after:
                after[before] = stretch
            else:
                heads.append(stretch)
        for head in heads:
            run = [head]
            while (at := after.get(run[-1])) is not None:
                run.append(at)
            yield from self._run(run, 0)

    def _run(self, stretches: Sequence[Stretch], flags: int) -> Iterator[_Run]:
        """One run; none if none of its blocks is published. Blocks between the stretches are not published."""
        head = stretches[0]
        packed = self._hashes(head) if len(stretches) == 1 else b"".join(map(self._hashes, stretches))
        if not packed:
            return
        first_index = self._first_index(head)
        before_index = first_index - self._step
        before = _holder_of(head.parent, before_index)
        parent = None
        if before is not None:
            at = HASH_BYTES * (before_index - before.index)
            parent = before.hashes[at : at + HASH_BYTES]
        yield head.namespace, flags, packed, parent, first_index

    def _first_index(self, stretch: Stretch) -> int:
        """Index of the first published block in this stretch or after it."""
        return stretch.index + (self._last - stretch.index) % self._step

    # ---------------------------------------------------------------- snapshots

    def chunks(self, namespaces: Iterable[Namespace]) -> list[SnapshotChunk]:
        """Everything published now, chain by chain."""
        chunks: list[SnapshotChunk] = []
        for namespace in namespaces:
            for _, flags, packed, parent, first_index in self._runs(_usable(namespace)):
                for at in range(0, len(packed), HASH_BYTES * CHUNK_BLOCKS):
                    part = packed[at : at + HASH_BYTES * CHUNK_BLOCKS]
                    before = packed[at - HASH_BYTES : at] if at else parent
                    index = first_index + at // HASH_BYTES * self._step
                    chunks += [SnapshotChunk(namespace.scope_id, tier, part, before, index) for tier in _TIERS[flags]]
        return chunks


def _usable(namespace: Namespace) -> Iterator[Stretch]:
    """The usable blocks of a namespace, depth first."""
    waiting = [stretch for stretch in namespace.roots.values() if stretch.usable > 0]
    while waiting:
        stretch = waiting.pop()
        yield stretch
        waiting.extend(child for child in stretch.iter_children() if child.usable > 0)


def _holder_of(stretch: Stretch | None, index: int) -> Stretch | None:
    """The stretch with block `index` of the chain that ends with `stretch`; None for a negative index."""
    if index < 0:
        return None
    while stretch is not None and stretch.index > index:
        stretch = stretch.parent
    return stretch


def _depth(item: _WithFlags) -> int:
    stretch, _ = item
    return stretch.index


def _flags(item: _WithFlags) -> int:
    _, flags = item
    return flags
