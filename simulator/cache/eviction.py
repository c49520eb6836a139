"""Which unreferenced cached block goes first.

Only leaves are ever candidates: a block that another cached block continues stays until that one is gone. So every
policy frees a sequence from its tail, as vLLM does, and what remains can always be reached from its first block.
"""

import heapq
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T", bound=int)

EvictionKey: TypeAlias = tuple[int, int]


class EvictionPolicy(StrEnum):
    """What a candidate's turn depends on."""

    LRU = "lru"
    """The one released longest ago."""
    FIFO = "fifo"
    """The one cached longest ago, however often it was hit since."""
    FREQUENCY = "frequency"
    """The one hit least often; of equals the one released longest ago."""

    def key(self, *, cached_at: int, released_at: int, hits: int) -> EvictionKey:
        """Its place in the queue, lowest first; the times are ticks of the cache's own counter."""
        if self is EvictionPolicy.FIFO:
            return (cached_at, 0)
        if self is EvictionPolicy.FREQUENCY:
            return (hits, released_at)
        return (released_at, 0)


class EvictionQueue(Generic[T]):
    """A priority queue of candidates from which any can be taken back.

    `put` is O(log n) and also moves a candidate to a new place; `discard` is O(1).
    """

    def __init__(self) -> None:
        self._keys: dict[T, EvictionKey] = {}
        self._heap: list[tuple[EvictionKey, T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, candidate: T) -> bool:
        return candidate in self._keys

    def put(self, candidate: T, key: EvictionKey) -> None:
        """Make it a candidate, or move it."""
        if self._keys.get(candidate) == key:
            return
        self._keys[candidate] = key
        heapq.heappush(self._heap, (key, candidate))
        # Entries of moved and discarded candidates stay in the heap until they surface; a cache that is hit often and
        # never full would let them pile up.
        if len(self._heap) > 4 * len(self._keys) + 64:
            self._heap = [(key, candidate) for candidate, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, candidate: T) -> None:
        """No candidate any more, if it was one."""
        self._keys.pop(candidate, None)

    def pop(self) -> T:
        """Take the candidate whose turn it is. Raises IndexError when there is none."""
        while True:
            key, candidate = heapq.heappop(self._heap)
            if self._keys.get(candidate) == key:
                del self._keys[candidate]
                return candidate
