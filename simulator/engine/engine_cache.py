"""The cache interface of an engine. `KVCache` implements it, and `HybridCache` for models with several kinds of
attention."""

from collections.abc import Sequence
from typing import Protocol

from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.errors import SequenceId
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.cache.pressure import MemoryPressure
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from kvatlas_simulator.cache.stats import CacheStats


class EngineCache(Protocol):
    """One device's cache manager. Its promises are those of `KVCache`."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_cpu_blocks(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def available_blocks(self) -> int: ...

    @property
    def utilisation(self) -> float: ...

    @property
    def pressure(self) -> MemoryPressure: ...

    def stats(self) -> CacheStats: ...

    def match(
        self, token_ids: Sequence[int], namespace: Namespace, earlier: PrefixMatch | None = None
    ) -> PrefixMatch: ...

    def swap_ins(self, match: PrefixMatch) -> int: ...

    def can_admit(self, request: AllocationRequest, match: PrefixMatch, step_tokens: int) -> bool: ...

    def allocate(
        self, request: AllocationRequest, match: PrefixMatch | None = None, *, count_lookup: bool = True
    ) -> object: ...

    def can_extend(self, sequence_id: SequenceId, tokens: int) -> bool: ...

    def extend(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None: ...

    def fork(self, sequence_id: SequenceId, new_sequence_id: SequenceId) -> object: ...

    def free(self, sequence_id: SequenceId) -> None: ...

    def reset(self, *, include_cpu: bool = False) -> bool: ...

    def take_events(self) -> tuple[KVEvent, ...]: ...
