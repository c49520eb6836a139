"""The marks in one shard of the memory index. A model of `redis/functions/_marks.lua` and `_mark_lookup.lua`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvatlas.blocks.digest import MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.index.holder_entries import NUMBER_BYTES
from kvatlas.index.mark_lookup import (
    BITS_BYTES,
    HEAD_ENTRY_BYTES,
    MarkedHolder,
    bits_in,
    deepest_positions,
    find_sized,
    has_mark,
    walk_positions,
)


@dataclass(slots=True)
class HolderMarks:
    """A holder with marks: the number of blocks by which a position lies before its mark, and the digest of its marks."""

    dropped: int
    digest: MarkDigest = field(default_factory=MarkDigest)


class MarkTable:
    """Values of marked blocks and of heads, by scope and hash, and the holders with marks, by their 3-byte numbers."""

    def __init__(self) -> None:
        self.marked: dict[bytes, HolderMarks] = {}
        self.marks: dict[bytes, dict[bytes, bytes]] = {}
        self.heads: dict[bytes, dict[bytes, bytes]] = {}

    # ------------------------------------------------------------ changes

    def mark(self, number: bytes, scope_id: bytes, hashes: Iterable[bytes]) -> None:
        """Mark these blocks for a holder."""
        values = self.marks.setdefault(scope_id, {})
        for key in hashes:
            value = values.get(key, b"")
            at, found = find_sized(value, number, NUMBER_BYTES)
            if not found:
                values[key] = value[:at] + number + value[at:]
                self.marked[number].digest.add_marks(scope_id, key)

    def unmark(self, number: bytes, scope_id: bytes, hashes: Iterable[bytes]) -> None:
        """Remove a holder's marks from blocks."""
        values = self.marks.get(scope_id, {})
        for key in hashes:
            value = values.get(key, b"")
            at, found = find_sized(value, number, NUMBER_BYTES)
            if found:
                replace_value(values, key, value[:at] + value[at + NUMBER_BYTES :])
                self.marked[number].digest.add_marks(scope_id, key, -1)

    def set_heads(self, number: bytes, scope_id: bytes, hashes: bytes, bits: bytes) -> None:
        """Set a holder's bits at these heads; an entry whose bits are all 0 is removed."""
        values = self.heads.setdefault(scope_id, {})
        for at in range(0, len(hashes), HASH_BYTES):
            self._set_head(number, scope_id, values, hashes[at : at + HASH_BYTES], bits[at : at + BITS_BYTES])

    def _set_head(self, number: bytes, scope_id: bytes, values: dict[bytes, bytes], key: bytes, bits: bytes) -> None:
        value, digest = values.get(key, b""), self.marked[number].digest
        at, found = find_sized(value, number, HEAD_ENTRY_BYTES)
        rest = value[at + HEAD_ENTRY_BYTES :] if found else value[at:]
        digest.add_head(scope_id, key, bits_in(value, number), -1)
        digest.add_head(scope_id, key, int.from_bytes(bits, "big"))
        replace_value(values, key, value[:at] + (number + bits if any(bits) else b"") + rest)

    def load(self, scope_id: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Take over marks and heads from another index, each once, in that index's field format: a head's hash is followed by
        HEAD_SUFFIX. Entries of holders that have no marks here are dropped."""
        marks, heads = self.marks.setdefault(scope_id, {}), self.heads.setdefault(scope_id, {})
        for name, value in fields.items():
            key = name[:HASH_BYTES]
            values, size = (marks, NUMBER_BYTES) if key == name else (heads, HEAD_ENTRY_BYTES)
            if key in values:
                continue
            kept = [
                one for at in range(0, len(value), size) if (one := value[at : at + size])[:NUMBER_BYTES] in self.marked
            ]
            for entry in kept:
                digest = self.marked[entry[:NUMBER_BYTES]].digest
                if size == NUMBER_BYTES:
                    digest.add_marks(scope_id, key)
                else:
                    digest.add_head(scope_id, key, int.from_bytes(entry[NUMBER_BYTES:], "big"))
            if kept:
                values[key] = b"".join(kept)

    @property
    def tables(self) -> tuple[tuple[dict[bytes, dict[bytes, bytes]], int], ...]:
        """The two tables of values, by scope and hash, each with the size of an entry in bytes."""
        return (self.marks, NUMBER_BYTES), (self.heads, HEAD_ENTRY_BYTES)

    # ------------------------------------------------------------ questions

    def is_marked(self, number: bytes, scope_id: bytes, key: bytes) -> bool | None:
        """True if a prompt can resume after this block of the holder; None if the holder has no marks."""
        return has_mark(self.marks.get(scope_id, {}).get(key), number) if number in self.marked else None

    def positions(
        self,
        scope_id: bytes,
        hashes: bytes,
        depths: Mapping[bytes, int],
        limit: int,
        first_index: int,
        *,
        walk: bool = False,
    ) -> dict[int, int]:
        """Holder number -> the position at which that holder, which has marks, can resume the chain (0: nowhere). `walk`: look
        at every block, without using the heads."""
        holders = {
            number: MarkedHolder(depth, self.marked[number].dropped)
            for number, depth in depths.items()
            if number in self.marked
        }
        get_mark = self.marks.get(scope_id, {}).get
        if walk:
            found = walk_positions(get_mark, hashes, holders, limit, first_index)
        else:
            get_head = self.heads.get(scope_id, {}).get
            found = deepest_positions(get_head, get_mark, hashes, holders, limit, first_index)
        return {int.from_bytes(number, "big"): found.get(number, 0) for number in holders}

    def recount(self, number: bytes) -> MarkDigest:
        """The digest of a holder's marks, counted from the values."""
        digest = MarkDigest()
        for scope_id, values in self.marks.items():
            for key, value in values.items():
                if find_sized(value, number, NUMBER_BYTES)[1]:
                    digest.add_marks(scope_id, key)
        for scope_id, values in self.heads.items():
            for key, value in values.items():
                digest.add_head(scope_id, key, bits_in(value, number))
        return digest


def replace_value(values: dict[bytes, bytes], key: bytes, value: bytes) -> None:
    """Set the value; an empty one deletes the key."""
    if value:
        values[key] = value
    else:
        values.pop(key, None)
