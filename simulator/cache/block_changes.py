"""What happened to the cache's blocks, in order: the values a KV event feed is made of."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Medium(StrEnum):
    """Where a copy of a block lies, in vLLM's words."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of full blocks of one sequence, head first, each the parent of the next, has one more copy on `medium`."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    """Of all its blocks, `len(block_hashes)` times the block size."""
    medium: Medium
    adapter: str | None
    extra_keys: tuple[tuple[str, ...], ...]
    """One entry a block; empty where a block has none."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of a block left `medium`; another may remain there."""

    block_hash: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class GpuCleared:
    """Every block left the GPU; the CPU tier is as it was."""


BlockChange: TypeAlias = BlocksStored | BlockRemoved | GpuCleared
