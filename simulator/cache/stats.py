"""The cache's counters, and how full it is."""

from dataclasses import dataclass
from enum import Enum


class MemoryPressure(Enum):
    """The share of GPU blocks that sequences hold, as a level; a level's value is the fraction from which it applies."""

    LOW = 0.0
    MEDIUM = 0.6
    HIGH = 0.8
    CRITICAL = 0.95

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def of(cls, utilisation: float) -> "MemoryPressure":
        """The level at a utilisation of 0..1."""
        return max((level for level in cls if utilisation >= level.value), key=lambda level: level.value)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start, in blocks, and current fractions (0..1)."""

    allocations: int
    """GPU blocks handed out."""
    hits: int
    """Full prompt blocks that were found, on the GPU or the CPU."""
    misses: int
    """Full prompt blocks that had to be computed."""
    evictions: int
    """Cached copies that left the GPU to make room."""
    copies: int
    """Partial blocks copied on write because another sequence held them too."""
    swapped_out: int
    swapped_in: int
    cpu_evictions: int
    utilisation: float
    """GPU blocks that sequences hold, of all."""
    fragmentation: float
    """Slots without a token, of all slots in the blocks that sequences hold."""
    cached_blocks: int
    """GPU blocks with a hash, held or not."""
    cpu_blocks: int

    @property
    def hit_rate(self) -> float:
        """Hits among all looked-up blocks; 0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0

    @property
    def pressure(self) -> MemoryPressure:
        return MemoryPressure.of(self.utilisation)
