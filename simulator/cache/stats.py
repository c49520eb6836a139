"""The cache's counters, how full it is, and the results of its maintenance calls."""

from dataclasses import dataclass, field

from kvatlas_simulator.cache.pressure import MemoryPressure


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start, in blocks, and current fractions (0..1)."""

    allocations: int
    """GPU blocks that were handed out."""
    deallocations: int
    """GPU blocks that became free again; allocations minus these are the blocks in use."""
    hits: int
    """Full prompt blocks that were found, on the GPU or the CPU."""
    misses: int
    """Full prompt blocks that had to be computed."""
    evictions: int
    """Cached copies that left the GPU to make room for blocks or for prefixes."""
    copies: int
    """Partial blocks copied on write because another sequence also held them."""
    failures: int
    """Calls that were refused for lack of blocks."""
    swapped_out: int
    swapped_in: int
    cpu_evictions: int
    utilisation: float
    """Share of the GPU blocks that sequences hold."""
    pressure: MemoryPressure
    fragmentation: float
    """Share of empty slots in the blocks that sequences hold."""
    free_fragmentation: float
    """Share of the free blocks outside the longest run of adjacent ones."""
    memory_bytes: int
    """Bytes of the GPU blocks that sequences hold."""
    total_memory_bytes: int
    """Bytes of all GPU blocks, in use or not."""
    reserved_memory_bytes: int
    """Bytes of the GPU blocks for which memory is reserved (`PoolSettings`)."""
    cached_blocks: int
    """GPU blocks with a hash, held or not."""
    cached_prefixes: int
    """Cached chains of blocks that no cached block continues, on the GPU or the CPU."""
    cpu_blocks: int
    """Cached blocks on the CPU."""
    swap_blocks: int
    """CPU blocks of swapped-out sequences."""

    @property
    def hit_rate(self) -> float:
        """Share of hits among all looked-up blocks; 0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


@dataclass(frozen=True, slots=True)
class GarbageCollection:
    """The result of `gc`."""

    blocks: int
    """GPU blocks that are newly free."""
    memory_bytes: int
    """The size of these blocks."""
    prefixes: int
    """Number of cached prefixes dropped."""
    time_ms: float = field(default=0.0, compare=False)
    """Duration in milliseconds of real time."""


@dataclass(frozen=True, slots=True)
class Defragmentation:
    """The result of `defragment`. Fragmentation is the share of the free blocks outside the longest run of adjacent
    ones."""

    moved_blocks: int
    fragmentation_before: float
    fragmentation_after: float
