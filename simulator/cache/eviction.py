"""The order in which unreferenced cached blocks are evicted.

Only leaves are candidates: a block stays while a cached block continues it. So every policy frees a sequence from its tail,
as vLLM does, and the rest stays reachable from its first block.
"""

import heapq
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T", bound=int)

EvictionKey: TypeAlias = tuple[float, ...]


class BlockUse(NamedTuple):
    """A candidate's history; the times are unique ticks of the cache's own counter."""

    cached_at: int
    released_at: int
    """When the last sequence that held it released it."""
    hits: int
    depth: int
    """Number of blocks before it in its prefix."""


class EvictionPolicy(Protocol):
    """Orders the candidates. It never sees a block that a sequence holds, or that a cached block continues."""

    def key(self, use: BlockUse) -> EvictionKey:
        """A candidate's place in the queue; the lowest comes first. The same use always gives the same key, and all keys
        can be compared."""
        ...


class BuiltInPolicy(StrEnum):
    """The built-in policies, described by the block that they evict first."""

    LRU = "lru"
    """The block released longest ago."""
    FIFO = "fifo"
    """The block cached longest ago, however often it has been hit since."""
    FREQUENCY = "frequency"
    """The block that was hit least often; among equals, the one released longest ago."""

    def key(self, use: BlockUse) -> EvictionKey:
        if self is BuiltInPolicy.FIFO:
            return (use.cached_at,)
        if self is BuiltInPolicy.FREQUENCY:
            return (use.hits, use.released_at)
        return (use.released_at,)


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
        """Withdraw a candidate; has no effect on anything that is not one."""
        self._keys.pop(candidate, None)

    def pop(self) -> T:
        """Take the candidate with the lowest key. Raises IndexError if the queue is empty."""
        while True:
            key, candidate = heapq.heappop(self._heap)
            if self._keys.get(candidate) == key:
                del self._keys[candidate]
                return candidate
