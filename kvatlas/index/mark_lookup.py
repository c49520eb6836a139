"""At which depth of a chain each holder with marks can resume it: exact, from a few fields.

A worker whose residency does not say what its engine reuses (a hybrid model) has marks. `marks` has a value for each marked
block: the numbers of the holders that can resume there. `heads` has one for each head, a block whose index is a multiple of
SEGMENT: an entry for each holder with a marked block among the SEGMENT indices from there on, with a bit for each offset at
which there is any, on whatever branch below the head. So a bit may be another branch's: what counts is the mark itself.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.index.holder_entries import NUMBER_BYTES

SEGMENT = 64
"""Blocks that a head has a bit for each."""

BITS_BYTES = 8
HEAD_ENTRY_BYTES = NUMBER_BYTES + BITS_BYTES
"""An entry of a head's value: the holder's number, then its bits, big-endian. Entries are sorted by number."""

Get = Callable[[bytes], bytes | None]


class MarkedHolder(NamedTuple):
    """A holder with marks: the leading blocks of the chain that it has, and how many a position lies before its mark."""

    depth: int
    dropped: int = 0


def deepest_positions(
    get_head: Get, get_mark: Get, hashes: bytes, holders: Mapping[bytes, MarkedHolder], limit: int
) -> dict[bytes, int]:
    """The deepest position, at most `limit` blocks, at which each of the holders can resume the chain of packed hashes.

    Holders that can't resume it anywhere are absent. `get_head` and `get_mark` give the values of a block's packed hash.
    """
    found: dict[bytes, int] = {}
    for number, (depth, dropped) in holders.items():
        last = min(depth, limit + dropped) - 1
        if last < dropped:
            continue
        for first in range(last // SEGMENT * SEGMENT, -1, -SEGMENT):
            offsets = (1 << last - first + 1) - 1 & bits_in(get_head(_hash_at(hashes, first)), number)
            while offsets:
                offset = offsets.bit_length() - 1
                if _has(get_mark(_hash_at(hashes, first + offset)), number):
                    found[number] = first + offset + 1 - dropped
                    break
                offsets ^= 1 << offset
            if number in found:
                break
    return found


def bits_in(value: bytes | None, number: bytes) -> int:
    """The holder's bits in a head's value; 0 where it has no entry."""
    at = _find(value or b"", number, HEAD_ENTRY_BYTES)
    return 0 if at is None or value is None else int.from_bytes(value[at + NUMBER_BYTES : at + HEAD_ENTRY_BYTES], "big")


def _has(value: bytes | None, number: bytes) -> bool:
    return value is not None and _find(value, number, NUMBER_BYTES) is not None


def _find(value: bytes, number: bytes, entry_bytes: int) -> int | None:
    at = value.find(number)
    while at >= 0 and at % entry_bytes:
        at = value.find(number, at + 1)
    return at if at >= 0 else None


def _hash_at(hashes: bytes, index: int) -> bytes:
    return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
