"""Applies common engine events to whole plain stretches: one copy of each block, in the device tier."""

from collections.abc import Iterable, Iterator, Sequence

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas_publishers.engine_events import EngineHash, EngineStored
from kvatlas_publishers.ledger.block import Stretch
from kvatlas_publishers.ledger.holdings import Holdings
from kvatlas_publishers.ledger.lineage import Lineage, Part, Place


class PlainStretches:
    """Sets the copies of whole stretches. `Residency` handles everything else block by block."""

    def __init__(self, lineage: Lineage, holdings: Holdings) -> None:
        self._lineage = lineage
        self._indexed = holdings.indexed

    def store(self, event: EngineStored, place: Place) -> bool:
        """Store evicted blocks again as they were, followed by new ones whose hashes are neither known nor counted. For
        any other event, do nothing and return False."""
        lineage, names = self._lineage, event.hashes
        if event.offloaded or lineage.variants.detached or place.parent in lineage.variants.names:
            return False
        evicted = lineage.find_evicted(place, names) if names[0] in lineage.known else []
        if evicted is None:
            return False
        back = sum(part.last - part.first for part in evicted)
        new = names[back:] if back else names
        hashes = place.hashes[HASH_BYTES * back :] if back else place.hashes
        if new and not self._is_new(new, hashes[:HASH_BYTES], evicted[-1] if evicted else None, place):
            return False
        parent = place.parent
        for part in evicted:
            parent = lineage.cut_out(part)
            parent.copies = 1
            lineage.changed.append(parent)
            for name in parent.names:
                del lineage.evicted[name]
        if new:
            lineage.changed += lineage.add(place.namespace, parent, hashes, new, 1)
        return True

    def remove(self, names: Iterable[EngineHash]) -> None:
        """Remove the only copies of these blocks, each in a plain stretch."""
        lineage = self._lineage
        by_stretch: dict[Stretch, list[EngineHash]] = {}
        for name in names:
            by_stretch.setdefault(lineage.known[name], []).append(name)
        for stretch, some in by_stretch.items():
            for part in _parts(stretch, some):
                gone = lineage.cut_out(part)
                gone.copies = 0
                lineage.changed.append(gone)

    def clear(self) -> list[EngineHash]:
        """Remove all copies. Returns the hashes that had one."""
        removed: list[EngineHash] = []
        for stretch in self._lineage.plain():
            if stretch.copies:
                stretch.copies = 0
                self._lineage.changed.append(stretch)
                removed += stretch.names
        return removed

    def _is_new(self, names: Sequence[EngineHash], first_hash: bytes, after: Part | None, place: Place) -> bool:
        """True if these hashes are distinct and neither known nor counted, and the position where they belong (after the part
        `after`, or else `place`) is free."""
        once = dict.fromkeys(names)
        if len(once) < len(names) or not self._lineage.known.keys().isdisjoint(once):
            return False
        if any(not holding.counts.keys().isdisjoint(once) for holding in self._indexed if holding.counts):
            return False
        if after is not None and after.last < len(after.stretch.names):
            at = HASH_BYTES * after.last
            return after.stretch.hashes[at : at + HASH_BYTES] != first_hash
        parent = place.parent if after is None else after.stretch
        found = place.namespace.roots.get(first_hash) if parent is None else parent.child(first_hash)
        return found is None


def _parts(stretch: Stretch, names: Sequence[EngineHash]) -> Iterator[Part]:
    """The parts of a plain stretch that have these names, last part first."""
    if len(names) == len(stretch.names):
        yield Part(stretch, 0, len(names))
        return
    if len(names) == 1:
        at = stretch.names.index(names[0])
        yield Part(stretch, at, at + 1)
        return
    positions = sorted(map(stretch.names.index, names))
    last = positions[-1] + 1
    for at, before in zip(reversed(positions), [*positions[-2::-1], -2], strict=True):
        if before != at - 1:
            yield Part(stretch, at, last)
            last = before + 1
