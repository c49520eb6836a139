"""The counts of one `apply`, and the only list of possible message outcomes."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, sub


@dataclass(slots=True)
class ApplyCounts:
    """Messages by outcome (see the fence in `kvatlas.index.protocol`), failed checks, and what has changed.

    `stored`, `removed`: residencies, one for each (block, tier). `bytes_written`: block hashes and holders values. The function
    in the store returns its numbers in the order of these fields (`COUNTS` in `redis/functions/_apply.lua`).
    """

    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    refused: int = 0
    failed_checks: int = 0
    stored: int = 0
    removed: int = 0
    bytes_written: int = 0

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, name) for name in self.__slots__)

    def __add__(self, other: "ApplyCounts") -> "ApplyCounts":
        return ApplyCounts(*map(add, self, other))

    def __sub__(self, other: "ApplyCounts") -> "ApplyCounts":
        return ApplyCounts(*map(sub, self, other))
