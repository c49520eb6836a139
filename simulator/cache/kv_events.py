"""KV events: what happened to the cache's blocks, in order."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Medium(StrEnum):
    """Where a copy of a block is, in vLLM's words."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Each block of a run has one more copy on `medium`. The run is head first: each block is the parent of the next."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    """Of all its blocks, `len(block_hashes)` times the block size."""
    medium: Medium
    adapter: str | None
    extra_keys: tuple[tuple[str, ...], ...]
    """One entry a block; empty if the block has none."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of a block left `medium`; another may remain there."""

    block_hash: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class GpuCleared:
    """Every block left the GPU; the CPU tier did not change."""


KVEvent: TypeAlias = BlocksStored | BlockRemoved | GpuCleared
