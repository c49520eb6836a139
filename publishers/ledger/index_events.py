"""From a change of the usable residency to index events, in the order that keeps every prefix of them prefix-closed.

The order within a batch: added tiers, lost tiers, removals child first, stores parent first. With granularity g only the
blocks whose index % g == g-1 are announced; `parent` is then the announced block before.
"""

from collections.abc import Iterable, Iterator
from operator import itemgetter

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.events import Cleared, IndexEvent, Removed, SnapshotChunk, Stored
from publishers.ledger.lineage import Block, Namespace
from publishers.ledger.prefix_closure import Change

CHUNK_BLOCKS = 4096
"""A snapshot chunk has at most 32 KiB of hashes."""

_TIERS: tuple[tuple[Tier, ...], ...] = tuple(tiers_of(flags) for flags in range(1 << len(Tier)))

Run = tuple[Namespace, int, bytes, bytes | None, int]
"""Blocks of one chain in a row: namespace, tier flags, packed hashes, packed parent or None, index of the first."""


def _by_depth(item: tuple[Block, int]) -> int:
    return item[0].index


class Announcement:
    """Everything that is announced now, as a digest and a number of blocks, and how a change of it is told."""

    __slots__ = ("_last", "_step", "blocks", "digest")

    def __init__(self, granularity: int) -> None:
        self._step = granularity
        self._last = granularity - 1
        self.digest = Digest()
        self.blocks = 0

    def is_announced(self, block: Block) -> bool:
        return block.told > 0 and block.index % self._step == self._last

    def tell(self, change: Change, cleared: bool) -> list[IndexEvent]:
        """The events of a change. `cleared`: the engine cleared a tier, so one event may say that all is gone."""
        events: list[IndexEvent] = []
        gone, born = change.gone, change.born
        if self._step > 1:
            gone = [item for item in gone if item[0].index % self._step == self._last]
        if cleared and gone and len(gone) == self.blocks:
            events.append(Cleared())
            self.digest = Digest()
            self.blocks = 0
        else:
            if change.moved:
                self._tell_moved(change.moved, events)
            if gone:
                self._tell_gone(gone, events)
        if born:
            for run in self._runs(born):
                self.blocks += len(run[2]) // 8
                self._store(run, run[1], events)
        return events

    def _store(self, run: Run, flags: int, events: list[IndexEvent]) -> None:
        namespace, _, hashes, parent, first_index = run
        for tier in _TIERS[flags]:
            events.append(Stored(namespace.scope_id, tier, hashes, parent, first_index))
            self.digest.add(namespace.scope_id, tier, hashes)

    def _remove(self, scope_id: bytes, flags: int, hashes: bytes, events: list[IndexEvent]) -> None:
        for tier in _TIERS[flags]:
            events.append(Removed(scope_id, tier, hashes))
            self.digest.add(scope_id, tier, hashes, -1)

    def _tell_moved(self, moved: list[tuple[Block, int]], events: list[IndexEvent]) -> None:
        announced = [item for item in moved if item[0].index % self._step == self._last]
        announced.sort(key=_by_depth)
        for tier in Tier:
            added = {block: None for block, before in announced if block.told & ~before & tier.flag}
            for run in self._added_runs(added):
                self._store(run, tier.flag, events)
        for tier in Tier:
            lost: dict[bytes, list[bytes]] = {}
            for block, before in reversed(announced):
                if before & ~block.told & tier.flag:
                    lost.setdefault(block.namespace.scope_id, []).append(block.sequence_hash)
            for scope_id, hashes in lost.items():
                self._remove(scope_id, tier.flag, b"".join(hashes), events)

    def _added_runs(self, added: dict[Block, None]) -> Iterator[Run]:
        """Chain runs of blocks in order of depth: chains are told apart by following parents."""
        after: dict[Block, Block] = {}
        heads: list[Block] = []
        for block in added:
            before = self._announced_before(block)
            if before is not None and before in added and before not in after:
                after[before] = block
            else:
                heads.append(block)
        for head in heads:
            hashes = [head.sequence_hash]
            at = after.get(head)
            while at is not None:
                hashes.append(at.sequence_hash)
                at = after.get(at)
            before = self._announced_before(head)
            parent = None if before is None else before.sequence_hash
            yield head.namespace, 0, b"".join(hashes), parent, head.index

    def _tell_gone(self, gone: list[tuple[Block, int]], events: list[IndexEvent]) -> None:
        """One event a scope and set of tiers, where no block of one is an ancestor of a block of another; else as the
        depths ask for it. A block in several tiers goes when the last of its tiers' events is told."""
        self.blocks -= len(gone)
        if len(gone) > 1:
            gone.sort(key=_by_depth, reverse=True)
        flags = gone[0][1]
        if any(item[1] != flags for item in gone):
            # Deeper blocks first whatever their tiers; of equal depth none is another's ancestor.
            gone.sort(key=itemgetter(1))
            gone.sort(key=_by_depth, reverse=True)
            self._tell_mixed(gone, events)
            return
        by_scope: dict[bytes, list[bytes]] = {}
        for block, _ in gone:
            scope_id = block.namespace.scope_id
            hashes = by_scope.get(scope_id)
            if hashes is None:
                by_scope[scope_id] = [block.sequence_hash]
            else:
                hashes.append(block.sequence_hash)
        for scope_id, hashes in by_scope.items():
            self._remove(scope_id, flags, b"".join(hashes), events)

    def _tell_mixed(self, gone: list[tuple[Block, int]], events: list[IndexEvent]) -> None:
        by_scope: dict[bytes, list[tuple[Block, int]]] = {}
        for item in gone:
            by_scope.setdefault(item[0].namespace.scope_id, []).append(item)
        for scope_id, items in by_scope.items():
            hashes: list[bytes] = []
            run_flags = items[0][1]
            for block, flags in items:
                if flags != run_flags:
                    self._remove(scope_id, run_flags, b"".join(hashes), events)
                    hashes, run_flags = [], flags
                hashes.append(block.sequence_hash)
            self._remove(scope_id, run_flags, b"".join(hashes), events)

    def _announced_before(self, block: Block) -> Block | None:
        """The announced block before this announced one in its chain."""
        before = block.parent
        for _ in range(self._step - 1):
            if before is None:
                return None
            before = before.parent
        return before

    def _runs(self, born: Iterable[Block]) -> Iterator[Run]:
        """Blocks in a row of one chain with the same tiers, thinned. `born` has parents before children."""
        step, last = self._step, self._last
        hashes: list[bytes] = []
        head: Block | None = None
        flags = 0
        previous: Block | None = None
        for block in born:
            follows = block.parent is previous and previous is not None
            previous = block
            if step > 1 and block.index % step != last:
                if not follows and head is not None:
                    yield self._run(head, flags, hashes)
                    head = None
                continue
            if head is not None:
                if follows and block.told == flags:
                    hashes.append(block.sequence_hash)
                    continue
                yield self._run(head, flags, hashes)
            head, flags, hashes = block, block.told, [block.sequence_hash]
        if head is not None:
            yield self._run(head, flags, hashes)

    def _run(self, head: Block, flags: int, hashes: list[bytes]) -> Run:
        before = self._announced_before(head)
        parent = None if before is None else before.sequence_hash
        return head.namespace, flags, b"".join(hashes), parent, head.index

    def chunks(self, namespaces: Iterable[Namespace]) -> list[SnapshotChunk]:
        """All that is announced now, chain by chain."""
        chunks: list[SnapshotChunk] = []
        for namespace in namespaces:
            for _, flags, packed, parent, first_index in self._runs(_in_chains(namespace)):
                for at in range(0, len(packed), 8 * CHUNK_BLOCKS):
                    part = packed[at : at + 8 * CHUNK_BLOCKS]
                    before = packed[at - 8 : at] if at else parent
                    index = first_index + at // 8 * self._step
                    chunks += [SnapshotChunk(namespace.scope_id, tier, part, before, index) for tier in _TIERS[flags]]
        return chunks


def _in_chains(namespace: Namespace) -> Iterator[Block]:
    """The usable blocks of a namespace, each chain as far as it goes before the next branch."""
    waiting = [block for block in namespace.blocks.values() if block.parent is None and block.told > 0]
    while waiting:
        block = waiting.pop()
        yield block
        waiting.extend(child for child in block.each_child() if child.told > 0)
