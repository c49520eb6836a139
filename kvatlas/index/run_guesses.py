"""Guesses where the runs of a lookup begin and end, based on an earlier lookup with the same start.

Prompts share starts, and the holders of these change slowly. A lookup that probes the guessed places first finds in one step
what would otherwise take several steps. A wrong guess costs probes but never changes an answer: intervals whose ends differ are
searched as usual.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from kvatlas.blocks.hashing import HASH_BYTES

STEP_BYTES = 64 * HASH_BYTES
"""The start of a chain is identified by the last hash of each stretch of this size."""
MOST_STARTS = 8_192
MOST_RUNS = 128
"""Lookups with more runs are not remembered."""


class RunGuesses:
    """Guesses for one shard. The start that was least recently used is dropped first."""

    def __init__(self, most_starts: int = MOST_STARTS) -> None:
        self._most_starts = most_starts
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, hashes: bytes) -> bytes:
        """Places to probe, as block indexes from the chain's first block: packed u32 (big-endian), ascending. They come from
        the longest start that is known; empty if none is."""
        kept = self._kept
        for end in range(len(hashes) - len(hashes) % STEP_BYTES, 0, -STEP_BYTES):
            start = hashes[end - HASH_BYTES : end]
            if (guess := kept.get(start)) is not None:
                kept.move_to_end(start)
                return guess
        return b""

    def keep(self, hashes: bytes, lengths: Sequence[int], used: bytes) -> None:
        """Remember the run lengths of a chain; `used`: what `find` returned for this chain."""
        guess = _pack_places(tuple(lengths)) if len(lengths) <= MOST_RUNS else b""
        if guess == used:
            return
        kept, stop = self._kept, sum(lengths) * HASH_BYTES if guess else 0
        for end in range(STEP_BYTES, len(hashes) + 1, STEP_BYTES):
            start = hashes[end - HASH_BYTES : end]
            if end <= stop:
                kept[start] = guess
            else:
                kept.pop(start, None)
        while len(kept) > self._most_starts:
            kept.popitem(last=False)


@lru_cache(maxsize=512)
def _pack_places(lengths: tuple[int, ...]) -> bytes:
    """The last block of each run and the block after it; a run of one block is one place."""
    places: list[int] = []
    end = 0
    for length in lengths:
        end += length
        places += (end,) if places and length == 1 else (end - 1, end)
    return Struct(f">{len(places)}I").pack(*places)
