"""The residency digest: two parties that hold the same set of blocks have equal digests.

Each tier has a count and two additive 32-bit sums over every (scope, sequence hash) held in that tier: the low and the high
half of the hash, each multiplied by an odd 20-bit number derived from the scope id. Because the sums are additive, a store or a
removal updates them without reading anything else, and a batch costs one multiplication. The scope is mixed in so that a block
in the wrong scope is noticed. (20 bits, because the store's Lua calculates in doubles.)
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import unpack

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue

_MASK = 0xFFFFFFFF
_MIX_MASK = 0xFFFFF
WORDS = 3 * len(Tier)
MARK_WORDS = 6


@lru_cache(maxsize=65_536)
def _mix(scope_id: bytes) -> tuple[int, int]:
    low, high = unpack("<II", scope_id)
    return low & _MIX_MASK | 1, high & _MIX_MASK | 1


def sums_of(packed_hashes: bytes) -> tuple[int, int]:
    """The sums of the low and the high halves of packed hashes, modulo 2^32."""
    halves = array("I", packed_hashes)
    if sys.byteorder == "big":
        halves.byteswap()
    return sum(halves[0::2]) & _MASK, sum(halves[1::2]) & _MASK


def _add(words: list[int], at: int, scope_id: bytes, packed_hashes: bytes, sign: int) -> None:
    low, high = sums_of(packed_hashes)
    mix_low, mix_high = _mix(scope_id)
    words[at] += sign * len(packed_hashes) // HASH_BYTES
    words[at + 1] = (words[at + 1] + sign * low * mix_low) & _MASK
    words[at + 2] = (words[at + 2] + sign * high * mix_high) & _MASK


class MarkDigest:
    """Mutable digest of marks: (count, low sum, high sum) of the marked blocks, then the same three for the heads.

    A head contributes its hash and its bits: the low sum adds (low half of the hash, 20 bits, odd) × (low half of the bits),
    and the high sum does the same with the high halves.
    """

    __slots__ = ("_words",)

    def __init__(self, words: Sequence[int] | None = None) -> None:
        """`words`: the words of a digest to start from."""
        self._words = list(words) if words is not None else [0] * MARK_WORDS

    def add_marks(self, scope_id: bytes, packed_hashes: bytes, sign: int = 1) -> None:
        """Add (sign 1) or subtract (sign -1) marked blocks."""
        _add(self._words, 0, scope_id, packed_hashes, sign)

    def add_head(self, scope_id: bytes, packed_hash: bytes, bits: int, sign: int = 1) -> None:
        """Add (sign 1) or subtract (sign -1) a head. A head without bits is ignored."""
        if not bits:
            return
        low, high = unpack("<II", packed_hash)
        mix_low, mix_high = _mix(scope_id)
        words = self._words
        words[3] += sign
        words[4] = (words[4] + sign * ((low & _MIX_MASK | 1) * (bits & _MASK) & _MASK) * mix_low) & _MASK
        words[5] = (words[5] + sign * ((high & _MIX_MASK | 1) * (bits >> 32) & _MASK) * mix_high) & _MASK

    @property
    def marks(self) -> int:
        """The number of marked blocks."""
        return self._words[0]

    @property
    def words(self) -> list[int]:
        """A copy of the 6 integers that the class docstring describes."""
        return list(self._words)


class Digest:
    """Mutable digest, by tier."""

    __slots__ = ("_words",)

    def __init__(self, words: list[int] | None = None) -> None:
        """`words`: 15 integers, (count, low sum, high sum) for each tier in order. Raises InvalidValue for anything else."""
        if words is not None and (len(words) != WORDS or any(not isinstance(w, int) or w < 0 for w in words)):
            raise InvalidValue(f"digest {words!r}; expected {WORDS} non-negative integers")
        self._words = list(words) if words is not None else [0] * WORDS

    def add(self, scope_id: bytes, tier: Tier, packed_hashes: bytes, sign: int = 1) -> None:
        """Add (sign 1) or subtract (sign -1) blocks. The caller must pass each block only once: this is a sum, not a set."""
        _add(self._words, 3 * tier, scope_id, packed_hashes, sign)

    def count(self, tier: Tier) -> int:
        return self._words[3 * tier]

    @property
    def blocks(self) -> int:
        """The number of blocks over all tiers; a block that is held in two tiers counts twice."""
        return sum(self._words[0::3])

    @property
    def words(self) -> list[int]:
        """A copy of the 15 integers: (count, low sum, high sum) for each tier in order."""
        return list(self._words)

    def copy(self) -> "Digest":
        return Digest(self._words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._words == other._words

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Digest({self._words})"
