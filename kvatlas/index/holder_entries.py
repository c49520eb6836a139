"""Holders values, which say who holds a block: entries of 4 bytes (holder number, flags), sorted by number.

They are sorted so that equal holders give equal bytes. The twin of this file in Lua is `redis/functions/_blocks.lua`.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvatlas.blocks.residency import HOLDER_ENTRY_BYTES
from kvatlas.blocks.tiers import TIER_MASK

NUMBER_BYTES = 3
MAX_HOLDER = (1 << 24) - 1
CACHED_VALUES = 4_096
"""About 3 MB with 64 holders per block. Blocks of the same message usually have the same holders; blocks of later messages
rarely do."""


def number_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def entries_of(value: bytes) -> Iterator[tuple[bytes, int]]:
    """(3-byte holder number, flags) of each entry."""
    for at in range(0, len(value), HOLDER_ENTRY_BYTES):
        yield value[at : at + NUMBER_BYTES], value[at + NUMBER_BYTES]


def depths_by_number(values: Sequence[bytes], lengths: Sequence[int]) -> dict[bytes, int]:
    """The number of leading blocks that each holder in the first run holds."""
    going = {number for number, _ in entries_of(values[0])}
    depths, position = {}, 0
    for value, length in zip(values, lengths, strict=True):
        here = {number for number, _ in entries_of(value)} if position else going
        depths.update(dict.fromkeys(going - here, position))
        going &= here
        position += length
    return depths | dict.fromkeys(going, position)


def find_entry(value: bytes, number: bytes) -> tuple[int, bool]:
    """(position of the holder's entry, True), or (position where the entry belongs, False)."""
    for at in range(0, len(value), HOLDER_ENTRY_BYTES):
        here = value[at : at + NUMBER_BYTES]
        if here == number:
            return at, True
        if here > number:
            return at, False
    return len(value), False


def without_holder(value: bytes, number: bytes) -> bytes:
    """The value without the holder's entry, whatever its tiers are."""
    at, found = find_entry(value, number)
    return value[:at] + value[at + HOLDER_ENTRY_BYTES :] if found else value


@lru_cache(CACHED_VALUES)
def with_entry(value: bytes, number: bytes, tier_bit: int) -> bytes:
    """The value after a store. Cached, so that equal values are mostly the same object."""
    at, found = find_entry(value, number)
    old = value[at + NUMBER_BYTES] if found else 0
    rest = value[at + HOLDER_ENTRY_BYTES :] if found else value[at:]
    return value[:at] + number + bytes((old | tier_bit,)) + rest


@lru_cache(CACHED_VALUES)
def without_entry(value: bytes, number: bytes, tier_bit: int) -> bytes:
    """The value after a removal; removing the last tier removes the entry."""
    at, found = find_entry(value, number)
    if not found or not value[at + NUMBER_BYTES] & tier_bit:
        return value
    new = value[at + NUMBER_BYTES] & ~tier_bit
    if not new & TIER_MASK:
        return value[:at] + value[at + HOLDER_ENTRY_BYTES :]
    return value[: at + NUMBER_BYTES] + bytes((new,)) + value[at + HOLDER_ENTRY_BYTES :]
