"""Turns a change of marks into index events, placed around those of residency.

The order within a batch: unmarked, residency's own events, marked, heads. So even if the index has applied only part of it,
each mark is on a held block. A mark that its head does not show yet is not found, and a head that shows too much is checked.
"""

from collections.abc import Iterable, Mapping

from kvatlas.blocks.digest import MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.events import Cleared, Heads, IndexEvent, Marked, Unmarked
from kvatlas_publishers.ledger.block import Stretch, packed_hashes
from kvatlas_publishers.ledger.index_events import CHUNK_BLOCKS
from kvatlas_publishers.ledger.marks.marks import MarkChange, Marks

_BITS_BYTES = 8


class MarkEvents:
    """Creates the events for one worker's marks. `digest` covers all marks published now."""

    __slots__ = ("_bits", "digest")

    def __init__(self) -> None:
        self.digest = MarkDigest()
        self._bits: dict[Stretch, int] = {}
        """Each head's bits, as published."""

    def make(self, change: MarkChange, events: list[IndexEvent]) -> list[IndexEvent]:
        """Create the events for a change of marks, with the events for residency in the middle."""
        if events and isinstance(events[0], Cleared):  # this removed the marks too
            self.digest = MarkDigest()
            self._bits.clear()
            unmarked: list[IndexEvent] = []
        else:
            unmarked = [Unmarked(scope_id, hashes) for scope_id, hashes in _by_scope(change.unmarked)]
            for scope_id, hashes in _by_scope(change.unmarked):
                self.digest.add_marks(scope_id, hashes, -1)
        marked = [Marked(scope_id, hashes) for scope_id, hashes in _by_scope(change.marked)]
        for event in marked:
            self.digest.add_marks(event.scope_id, event.hashes)
        return [*unmarked, *events, *marked, *self._make_heads(change.heads)]

    def _make_heads(self, heads: Mapping[Stretch, int]) -> list[Heads]:
        changed: dict[Stretch, int] = {}
        for head, bits in heads.items():
            before = self._bits.pop(head, 0)
            if bits:
                self._bits[head] = bits
            if bits != before:
                changed[head] = bits
                self.digest.add_head(head.namespace.scope_id, head.sequence_hash, before, -1)
                self.digest.add_head(head.namespace.scope_id, head.sequence_hash, bits)
        return _heads(changed)

    def snapshot(self, marks: Marks) -> list[Marked | Heads]:
        """All marks and their heads."""
        events: list[Marked | Heads] = []
        for scope_id, hashes in _by_scope(marks.marked):
            for at in range(0, len(hashes), HASH_BYTES * CHUNK_BLOCKS):
                events.append(Marked(scope_id, hashes[at : at + HASH_BYTES * CHUNK_BLOCKS]))
        heads = list(marks.heads.items())
        for at in range(0, len(heads), CHUNK_BLOCKS // 2):
            events += _heads(dict(heads[at : at + CHUNK_BLOCKS // 2]))
        return events


def _by_scope(blocks: Iterable[Stretch]) -> Iterable[tuple[bytes, bytes]]:
    """(scope id, packed hashes) for each scope."""
    by_scope: dict[bytes, list[Stretch]] = {}
    for block in blocks:
        by_scope.setdefault(block.namespace.scope_id, []).append(block)
    return [(scope_id, packed_hashes(some)) for scope_id, some in by_scope.items()]


def _heads(heads: Mapping[Stretch, int]) -> list[Heads]:
    by_scope: dict[bytes, list[tuple[Stretch, int]]] = {}
    for head, bits in heads.items():
        by_scope.setdefault(head.namespace.scope_id, []).append((head, bits))
    return [
        Heads(
            scope_id,
            packed_hashes(head for head, _ in some),
            b"".join(bits.to_bytes(_BITS_BYTES, "big") for _, bits in some),
        )
        for scope_id, some in by_scope.items()
    ]
