"""KV events: the changes to the cache's blocks, in order."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Medium(StrEnum):
    """The place of a block's copy, in vLLM's terms."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Each block of a run has one more copy on `medium`. The run is listed head first: each block is the parent of the next
    one.

    A group that keeps only some blocks of a run names only these; parent and tokens are still those of the whole run, as in
    vLLM.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    """The tokens of the whole run."""
    medium: Medium
    adapter: str | None
    extra_keys: tuple[tuple[str, ...], ...]
    """One entry per named block; empty for a block without extra keys."""
    group: int = 0
    """The KV cache group."""

    @property
    def salt(self) -> str | None:
        """The cache salt, if the run begins a prompt with one: it follows the adapter (`Namespace.extra_keys`)."""
        keys = self.extra_keys[0][self.adapter is not None :] if self.extra_keys else ()
        return keys[0] if keys else None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of a block left `medium`; another may remain there."""

    block_hash: int
    medium: Medium
    group: int = 0


@dataclass(frozen=True, slots=True)
class GpuCleared:
    """Every block left the GPU; the CPU tier did not change."""


KVEvent: TypeAlias = BlocksStored | BlockRemoved | GpuCleared
