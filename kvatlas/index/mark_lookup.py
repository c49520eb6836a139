"""The depth at which each holder with marks can resume a chain: an exact answer from a few fields.

A worker whose residency does not show what its engine reuses (a hybrid model) has marks. `marks` has a value for each marked
block: the numbers of the holders that can resume there. `heads` has a value for each head, which is a block whose index is a
multiple of SEGMENT: one entry per holder with a marked block among the SEGMENT indices from the head on, with a bit for each
offset at which there is a mark on any branch below the head. A bit may thus belong to a different branch; only the mark itself
counts.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.errors import InvalidValue
from kvatlas.index.holder_entries import NUMBER_BYTES

SEGMENT = 64
"""The number of blocks per head; a head has one bit for each."""

HEAD_SUFFIX = b"h"
"""Follows a head's hash in its field if the same HASH holds both marks and heads."""

HIGHEST_POSITION = (1 << 32) - 1
BITS_BYTES = 8
HEAD_ENTRY_BYTES = NUMBER_BYTES + BITS_BYTES
"""An entry in a head's value: the holder's number, then its bits, big-endian. Entries are sorted by number."""

Get = Callable[[bytes], bytes | None]


class MarkedHolder(NamedTuple):
    """A holder with marks: how many leading blocks of the chain it holds, and by how many blocks a position lies before its
    mark."""

    depth: int
    dropped: int = 0


def check_reach(first_index: int, limit: int | None) -> tuple[int, int]:
    """The index of a lookup's first block, and the highest position that the lookup may find. Raises InvalidValue if the first
    block is not a head."""
    if first_index < 0 or first_index % SEGMENT:
        raise InvalidValue(f"lookup from block {first_index}; expected a multiple of {SEGMENT}")
    return first_index, HIGHEST_POSITION if limit is None else max(0, limit)


def deepest_positions(
    get_head: Get,
    get_mark: Get,
    hashes: bytes,
    holders: Mapping[bytes, MarkedHolder],
    limit: int,
    first_index: int = 0,
) -> dict[bytes, int]:
    """For each of the holders, the deepest position, at most `limit` blocks, at which it can resume the chain of packed hashes.

    Holders that can't resume anywhere are absent. `get_head` and `get_mark` return the value for a block's packed hash.
    `first_index`: the index of the first hash in the chain, a multiple of SEGMENT. Depths count from there, positions from the
    start of the chain.
    """
    found: dict[bytes, int] = {}
    for number, (depth, dropped) in holders.items():
        last = min(depth, limit + dropped - first_index) - 1
        for first in range(last // SEGMENT * SEGMENT, -1, -SEGMENT):
            offsets = (1 << last - first + 1) - 1 & bits_in(get_head(_hash_at(hashes, first)), number)
            while offsets:
                offset = offsets.bit_length() - 1
                if has_mark(get_mark(_hash_at(hashes, first + offset)), number):
                    found[number] = max(0, first_index + first + offset + 1 - dropped)
                    break
                offsets ^= 1 << offset
            if number in found:
                break
    return found


def walk_positions(
    get_mark: Get, hashes: bytes, holders: Mapping[bytes, MarkedHolder], limit: int, first_index: int = 0
) -> dict[bytes, int]:
    """The same as `deepest_positions`, but found by checking every block."""
    found: dict[bytes, int] = {}
    for number, (depth, dropped) in holders.items():
        for index in range(min(depth, limit + dropped - first_index) - 1, -1, -1):
            if has_mark(get_mark(_hash_at(hashes, index)), number):
                found[number] = max(0, first_index + index + 1 - dropped)
                break
    return found


def bits_in(value: bytes | None, number: bytes) -> int:
    """The holder's bits in a head's value; 0 if there is no entry."""
    at, found = find_sized(value or b"", number, HEAD_ENTRY_BYTES)
    return int.from_bytes(value[at + NUMBER_BYTES : at + HEAD_ENTRY_BYTES], "big") if found and value else 0


def find_sized(value: bytes, number: bytes, entry_bytes: int) -> tuple[int, bool]:
    """(position of the entry that begins with this number, True), or (position where such an entry belongs, False)."""
    low, high = 0, len(value) // entry_bytes
    while low < high:
        middle = (low + high) // 2
        if value[middle * entry_bytes : middle * entry_bytes + NUMBER_BYTES] < number:
            low = middle + 1
        else:
            high = middle
    at = low * entry_bytes
    return at, value[at : at + NUMBER_BYTES] == number


def without_sized(value: bytes, number: bytes, entry_bytes: int) -> bytes:
    """The value without the holder's entry; the same object if there is no such entry."""
    at, found = find_sized(value, number, entry_bytes)
    return value[:at] + value[at + entry_bytes :] if found else value


def has_mark(value: bytes | None, number: bytes) -> bool:
    """True if the holder is listed in a mark's value."""
    return value is not None and find_sized(value, number, NUMBER_BYTES)[1]


def _hash_at(hashes: bytes, index: int) -> bytes:
    return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
