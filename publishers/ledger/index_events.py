"""From a change of the usable residency to index events, in the order that keeps every prefix of them prefix-closed.

The order within a batch: added tiers, lost tiers, removals child first, stores parent first. With granularity g only the
blocks whose index % g == g-1 are announced; `parent` is then the announced block before.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.events import Cleared, IndexEvent, Removed, SnapshotChunk, Stored
from publishers.ledger.block import Block, Namespace, packed_hashes
from publishers.ledger.prefix_closure import UsableChange

CHUNK_BLOCKS = 4096
"""A snapshot chunk has at most 32 KiB of hashes."""

_TIERS: tuple[tuple[Tier, ...], ...] = tuple(tiers_of(flags) for flags in range(1 << len(Tier)))

_BlockWithFlags = tuple[Block, int]
_Run = tuple[Namespace, int, bytes, bytes | None, int]
"""Consecutive blocks of one chain: namespace, tier flags, packed hashes, packed parent or None, index of the first."""


class IndexEvents:
    """Makes the events of one worker. `digest` and `blocks` are of everything that is announced now."""

    __slots__ = ("_last", "_step", "blocks", "digest")

    def __init__(self, granularity: int) -> None:
        self._step = granularity
        self._last = granularity - 1
        self.digest = Digest()
        self.blocks = 0

    def is_announced(self, block: Block) -> bool:
        return block.usable > 0 and block.index % self._step == self._last

    # ---------------------------------------------------------------- changes

    def make(self, change: UsableChange, cleared: bool) -> list[IndexEvent]:
        """The events of a change. `cleared`: the engine cleared a tier, so one event may say that all is gone."""
        events: list[IndexEvent] = []
        removed, added = change.removed, change.added
        if self._step > 1:
            removed = [(block, flags) for block, flags in removed if block.index % self._step == self._last]
        if cleared and removed and len(removed) == self.blocks:
            events.append(Cleared())
            self.digest = Digest()
            self.blocks = 0
        else:
            if change.moved:
                self._add_moved(change.moved, events)
            if removed:
                self._add_removed(removed, events)
        if added:
            for namespace, flags, hashes, parent, first_index in self._runs(added):
                self.blocks += len(hashes) // 8
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
        """One event for each tier of `flags`."""
        for tier in _TIERS[flags]:
            events.append(Stored(scope_id, tier, hashes, parent, first_index))
            self.digest.add(scope_id, tier, hashes)

    def _add_lost(self, scope_id: bytes, flags: int, hashes: bytes, events: list[IndexEvent]) -> None:
        """One event for each tier of `flags`."""
        for tier in _TIERS[flags]:
            events.append(Removed(scope_id, tier, hashes))
            self.digest.add(scope_id, tier, hashes, -1)

    def _add_moved(self, moved: list[_BlockWithFlags], events: list[IndexEvent]) -> None:
        """Blocks that stay and whose tiers changed: first every added tier, then every lost one."""
        announced = [(block, before) for block, before in moved if block.index % self._step == self._last]
        announced.sort(key=_depth)
        for tier in Tier:
            added = {block: None for block, before in announced if block.usable & ~before & tier.flag}
            for namespace, _, hashes, parent, first_index in self._runs_of_moved(added):
                self._add_stored(namespace.scope_id, tier.flag, hashes, parent, first_index, events)
        for tier in Tier:
            lost: dict[bytes, list[Block]] = {}
            for block, before in reversed(announced):
                if before & ~block.usable & tier.flag:
                    lost.setdefault(block.namespace.scope_id, []).append(block)
            for scope_id, lost_blocks in lost.items():
                self._add_lost(scope_id, tier.flag, packed_hashes(lost_blocks), events)

    def _add_removed(self, removed: list[_BlockWithFlags], events: list[IndexEvent]) -> None:
        """One event for each scope and set of tiers if no block of one is an ancestor of a block of another; else as the
        depths require. A block in several tiers is gone with the last of its tiers' events."""
        self.blocks -= len(removed)
        if len(removed) > 1:
            removed.sort(key=_depth, reverse=True)
        _, first_flags = removed[0]
        if any(flags != first_flags for _, flags in removed):
            # Deeper blocks first whatever their tiers; of equal depth none is another's ancestor.
            removed.sort(key=_flags)
            removed.sort(key=_depth, reverse=True)
            self._add_removed_of_several_tiers(removed, events)
            return
        by_scope: dict[bytes, list[Block]] = {}
        for block, _ in removed:
            scope_id = block.stretch.namespace.scope_id
            blocks = by_scope.get(scope_id)
            if blocks is None:
                by_scope[scope_id] = [block]
            else:
                blocks.append(block)
        for scope_id, blocks in by_scope.items():
            self._add_lost(scope_id, first_flags, packed_hashes(blocks), events)

    def _add_removed_of_several_tiers(self, removed: list[_BlockWithFlags], events: list[IndexEvent]) -> None:
        by_scope: dict[bytes, list[_BlockWithFlags]] = {}
        for block, flags in removed:
            by_scope.setdefault(block.namespace.scope_id, []).append((block, flags))
        for scope_id, blocks in by_scope.items():
            for flags, same in groupby(blocks, key=_flags):
                self._add_lost(scope_id, flags, packed_hashes(block for block, _ in same), events)

    # ---------------------------------------------------------------- runs of a chain

    def _runs(self, added: Iterable[Block]) -> Iterator[_Run]:
        """Consecutive blocks of one chain with the same tiers, every `granularity`-th of them. `added`: parents first."""
        step, last = self._step, self._last
        run: list[Block] = []
        flags = 0
        previous: Block | None = None
        for block in added:
            follows = block.parent is previous and previous is not None
            previous = block
            if step > 1 and block.index % step != last:
                if not follows and run:
                    yield self._run(run, flags)
                    run = []
                continue
            if run:
                if follows and block.usable == flags:
                    run.append(block)
                    continue
                yield self._run(run, flags)
            flags, run = block.usable, [block]
        if run:
            yield self._run(run, flags)

    def _runs_of_moved(self, moved: dict[Block, None]) -> Iterator[_Run]:
        """Runs of announced blocks that come by depth, chains mixed: each chain is found by following parents."""
        after: dict[Block, Block] = {}
        heads: list[Block] = []
        for block in moved:
            before = self._announced_before(block)
            if before is not None and before in moved and before not in after:
                after[before] = block
            else:
                heads.append(block)
        for head in heads:
            run = [head]
            while (at := after.get(run[-1])) is not None:
                run.append(at)
            yield self._run(run, 0)

    def _run(self, blocks: Sequence[Block], flags: int) -> _Run:
        head = blocks[0]
        before = self._announced_before(head)
        parent = None if before is None else before.sequence_hash
        return head.namespace, flags, packed_hashes(blocks), parent, head.index

    def _announced_before(self, block: Block) -> Block | None:
        """The announced block before this announced one in its chain."""
        before = block.parent
        for _ in range(self._step - 1):
            if before is None:
                return None
            before = before.parent
        return before

    # ---------------------------------------------------------------- snapshots

    def chunks(self, namespaces: Iterable[Namespace]) -> list[SnapshotChunk]:
        """All that is announced now, chain by chain."""
        chunks: list[SnapshotChunk] = []
        for namespace in namespaces:
            for _, flags, packed, parent, first_index in self._runs(_usable_blocks(namespace)):
                for at in range(0, len(packed), 8 * CHUNK_BLOCKS):
                    part = packed[at : at + 8 * CHUNK_BLOCKS]
                    before = packed[at - 8 : at] if at else parent
                    index = first_index + at // 8 * self._step
                    chunks += [SnapshotChunk(namespace.scope_id, tier, part, before, index) for tier in _TIERS[flags]]
        return chunks


def _usable_blocks(namespace: Namespace) -> Iterator[Block]:
    """The usable blocks of a namespace, each chain as far as it goes before the next branch."""
    waiting = [block for block in namespace.roots.values() if block.usable > 0]
    while waiting:
        block = waiting.pop()
        yield block
        waiting.extend(child for child in block.iter_children() if child.usable > 0)


def _depth(item: _BlockWithFlags) -> int:
    block, _ = item
    return block.index


def _flags(item: _BlockWithFlags) -> int:
    _, flags = item
    return flags
