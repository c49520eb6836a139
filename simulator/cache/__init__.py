"""The paged KV cache of one or several devices. Simulated engines run on it, and it has its own public interface.

    cache = KVCache(num_blocks=1_024, block_size=16)
    handle = cache.allocate(AllocationRequest("a", prompt_token_ids))
    cache.extend("a", [17, 18])
    handle.stats(), cache.stats()
    cache.free("a")

`KVCache` is the cache manager of one device, `DeviceCaches` manages several devices, and `PagedCache` is a lenient one that
knows only block ids; docs/cache-manager.md explains them.
"""

from kvatlas_simulator.cache.allocation import AllocationRequest, CacheHandle, HandleStats, Priority
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace, SeededBlockHasher
from kvatlas_simulator.cache.block_ids.block_allocator import BlockAllocator
from kvatlas_simulator.cache.block_ids.paged_cache import PagedCache, PagedCacheStats
from kvatlas_simulator.cache.block_pool import PoolSettings
from kvatlas_simulator.cache.block_table import BlockTable
from kvatlas_simulator.cache.cache_config import CacheConfig
from kvatlas_simulator.cache.devices import DeviceCaches, SequenceMove
from kvatlas_simulator.cache.errors import (
    CacheError,
    InsufficientBlocks,
    SequenceExists,
    SequenceId,
    SequenceNotFound,
    SequenceSwappedOut,
    SequenceTooLong,
    UnknownDevice,
)
from kvatlas_simulator.cache.eviction import BlockUse, BuiltInPolicy, EvictionKey, EvictionPolicy
from kvatlas_simulator.cache.geometry import DataType, KVGeometry
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium
from kvatlas_simulator.cache.prefix_cache import PrefixSettings
from kvatlas_simulator.cache.pressure import MemoryPressure, PressureThresholds
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from kvatlas_simulator.cache.stats import CacheStats, Defragmentation, GarbageCollection

__all__ = [
    "AllocationRequest",
    "BlockAllocator",
    "BlockHasher",
    "BlockRemoved",
    "BlockTable",
    "BlockUse",
    "BlocksStored",
    "BuiltInPolicy",
    "CacheConfig",
    "CacheError",
    "CacheHandle",
    "CacheStats",
    "DataType",
    "Defragmentation",
    "DeviceCaches",
    "EvictionKey",
    "EvictionPolicy",
    "GarbageCollection",
    "GpuCleared",
    "HandleStats",
    "InsufficientBlocks",
    "KVCache",
    "KVEvent",
    "KVGeometry",
    "Medium",
    "MemoryPressure",
    "Namespace",
    "PagedCache",
    "PagedCacheStats",
    "PoolSettings",
    "PrefixMatch",
    "PrefixSettings",
    "PressureThresholds",
    "Priority",
    "SeededBlockHasher",
    "SequenceExists",
    "SequenceId",
    "SequenceMove",
    "SequenceNotFound",
    "SequenceSwappedOut",
    "SequenceTooLong",
    "UnknownDevice",
]
