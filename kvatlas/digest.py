"""The residency digest: what two parties compare to know that they hold the same set of blocks.

For each tier a count and two additive 32-bit sums, over every (scope, sequence hash) held in that tier, of the halves of
`sequence hash XOR scope id` (both little-endian u64). Additive, so a store or a removal changes it without a look at
anything else; the scope is mixed in, so a block in the wrong scope is seen.
"""

import sys
from array import array

from kvatlas.errors import InvalidValue
from kvatlas.hashing import HASH_BYTES
from kvatlas.tiers import Tier

_MASK = 0xFFFFFFFF
WORDS = 3 * len(Tier)


class Digest:
    """Mutable digest by tier."""

    __slots__ = ("_words",)

    def __init__(self, words: list[int] | None = None) -> None:
        """`words`: 15 integers, (count, low sum, high sum) for each tier in order. Raises InvalidValue for others."""
        if words is not None and (len(words) != WORDS or any(not isinstance(w, int) or w < 0 for w in words)):
            raise InvalidValue(f"digest {words!r}; expected {WORDS} non-negative integers")
        self._words = list(words) if words is not None else [0] * WORDS

    def add(self, scope_id: bytes, tier: Tier, packed_hashes: bytes, sign: int = 1) -> None:
        """Count blocks in (sign 1) or out (sign -1). The caller says each block once: this is a sum, not a set."""
        count = len(packed_hashes) // HASH_BYTES
        mixed = int.from_bytes(packed_hashes, "little") ^ int.from_bytes(scope_id * count, "little")
        halves = array("I", mixed.to_bytes(len(packed_hashes), "little"))
        if sys.byteorder == "big":
            halves.byteswap()
        at = 3 * tier
        self._words[at] += sign * count
        self._words[at + 1] = (self._words[at + 1] + sign * sum(halves[0::2])) & _MASK
        self._words[at + 2] = (self._words[at + 2] + sign * sum(halves[1::2])) & _MASK

    def count(self, tier: Tier) -> int:
        return self._words[3 * tier]

    @property
    def blocks(self) -> int:
        """Blocks over all tiers; one held in two tiers counts twice."""
        return sum(self._words[0::3])

    @property
    def words(self) -> list[int]:
        """15 integers: (count, low sum, high sum) for each tier in order. A copy."""
        return list(self._words)

    def copy(self) -> "Digest":
        return Digest(self._words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._words == other._words

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Digest({self._words})"
