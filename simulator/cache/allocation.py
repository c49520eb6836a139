"""A request for cache memory, and the handle that the caller gets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.block_table import BlockTable
from kvatlas_simulator.cache.errors import SequenceId
from kvatlas_simulator.cache.geometry import KVGeometry


class Priority(IntEnum):
    """The order of `KVCache.preemption_order`: the lowest priority comes first and, among equals, the youngest."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A new sequence: its prompt, and the namespace in which equal tokens share blocks."""

    sequence_id: SequenceId
    token_ids: Sequence[int]
    namespace: Namespace = field(default_factory=Namespace)
    priority: Priority = Priority.NORMAL
    first_chunk: int | None = None
    """Number of tokens after the cached prefix that are written immediately; None: the whole prompt. `extend` writes
    the rest."""
    max_tokens: int | None = None
    """Maximum length of the sequence, including the prompt; None: limited only by the cache. No memory is reserved for
    it."""
    device: str | None = None
    """The device on which `DeviceCaches` should put the sequence, if it fits; a cache of one device ignores this."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < len(self.token_ids):
            raise InvalidValue(
                f"sequence {self.sequence_id}: max_tokens is {self.max_tokens}; its prompt has {len(self.token_ids)}"
            )

    def estimated_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of KV that `max_tokens` tokens (without that limit, the whole prompt) take if nothing is shared."""
        return geometry.bytes_of(len(self.token_ids) if self.max_tokens is None else self.max_tokens)


@dataclass(frozen=True, slots=True)
class HandleStats:
    """One sequence's memory. Shared blocks count in full."""

    memory_bytes: int
    """Blocks on the device: 0 while the sequence is swapped out."""
    blocks: int
    tokens: int
    utilisation: float
    """Share of the slots in its blocks that hold a token; 0 if it has no blocks."""
    last_access: float
    """Time of the sequence's last allocation, extension, read, fork or swap, in seconds of the cache's clock."""


class SequenceStore(Protocol):
    """The part of a cache that a handle uses."""

    def handle_stats(self, sequence_id: SequenceId) -> HandleStats: ...

    def block_table(self, sequence_id: SequenceId) -> BlockTable: ...


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A live sequence in a cache. After it is freed, every call raises SequenceNotFound."""

    sequence_id: SequenceId
    _cache: SequenceStore = field(repr=False)

    def stats(self) -> HandleStats:
        """The sequence's current memory."""
        return self._cache.handle_stats(self.sequence_id)

    def block_table(self) -> BlockTable:
        """A copy of its block table; empty while it is swapped out."""
        return self._cache.block_table(self.sequence_id)
