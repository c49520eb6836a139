"""The KV cache of a model with several kinds of attention: groups of layers share one pool and are evicted separately."""

from kvatlas_simulator.hybrid_cache.cache import HybridCache
from kvatlas_simulator.hybrid_cache.groups import CacheGroup, Retention

__all__ = ["CacheGroup", "HybridCache", "Retention"]
