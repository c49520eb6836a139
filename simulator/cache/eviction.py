"""Which unreferenced cached block is evicted first.

Only leaves are candidates: a block stays while a cached block continues it. So every policy frees a sequence from its
tail, as vLLM does, and the rest can always be reached from its first block.
"""

import heapq
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T", bound=int)

EvictionKey: TypeAlias = tuple[int, int]


class EvictionPolicy(StrEnum):
    """Which candidate is evicted first."""

    LRU = "lru"
    """The one released longest ago."""
    FIFO = "fifo"
    """The one cached longest ago, however often it was hit since."""
    FREQUENCY = "frequency"
    """The one hit least often; among equals the one released longest ago."""

    def key(self, *, cached_at: int, released_at: int, hits: int) -> EvictionKey:
        """A candidate's place in the queue, lowest first; the times are ticks of the cache's own counter."""
        if self is EvictionPolicy.FIFO:
            return (cached_at, 0)
        if self is EvictionPolicy.FREQUENCY:
            return (hits, released_at)
        return (released_at, 0)


class EvictionQueue(Generic[T]):
    """A priority queue from which any candidate can be withdrawn.

    `put` is O(log n) and also moves a candidate; `discard` is O(1).
    """

    def __init__(self) -> None:
        self._keys: dict[T, EvictionKey] = {}
        self._heap: list[tuple[EvictionKey, T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, candidate: T) -> bool:
        return candidate in self._keys

    def put(self, candidate: T, key: EvictionKey) -> None:
        """Add a candidate, or move it to a new key."""
        if self._keys.get(candidate) == key:
            return
        self._keys[candidate] = key
        heapq.heappush(self._heap, (key, candidate))
        # Entries of moved and discarded candidates stay in the heap until they surface. In a cache that is hit often and
        # never full they would pile up.
        if len(self._heap) > 4 * len(self._keys) + 64:
            self._heap = [(key, candidate) for candidate, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, candidate: T) -> None:
        """Withdraw a candidate; no effect on others."""
        self._keys.pop(candidate, None)

    def pop(self) -> T:
        """Take the candidate with the lowest key. Raises IndexError if there is none."""
        while True:
            key, candidate = heapq.heappop(self._heap)
            if self._keys.get(candidate) == key:
                del self._keys[candidate]
                return candidate
