"""A cache manager's settings as one value, with the usual defaults; `KVCache` and `DeviceCaches` take them one by one."""

from dataclasses import dataclass, field

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_pool import PoolSettings
from kvatlas_simulator.cache.devices import DeviceCaches
from kvatlas_simulator.cache.geometry import KVGeometry
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.prefix_cache import PrefixSettings
from kvatlas_simulator.cache.pressure import PressureThresholds


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of a cache manager. `max_blocks`: on each device; `initial_blocks` of these are reserved at the start."""

    block_size: int = 16
    max_blocks: int = 1_000
    initial_blocks: int = 100
    pooling: bool = True
    devices: tuple[str, ...] = ("cpu",)
    prefix_caching: bool = False
    prefixes: PrefixSettings = field(default_factory=PrefixSettings)
    """How prefixes are cached, if `prefix_caching` is on."""
    multi_device: bool = False
    thresholds: PressureThresholds = field(default_factory=PressureThresholds)

    def __post_init__(self) -> None:
        if not self.devices or (len(self.devices) > 1 and not self.multi_device):
            raise InvalidValue(f"{len(self.devices)} devices; expected one, or several with multi_device")

    def cache(self, geometry: KVGeometry | None = None) -> KVCache:
        """Create a cache for one device."""
        return KVCache(
            num_blocks=self.max_blocks,
            block_size=self.block_size,
            geometry=geometry,
            prefixes=self.prefixes if self.prefix_caching else PrefixSettings(sharing=False),
            thresholds=self.thresholds,
            pool=PoolSettings(self.initial_blocks, self.pooling),
        )

    def device_caches(self, geometry: KVGeometry | None = None) -> DeviceCaches:
        """Create a cache for each device."""
        return DeviceCaches({device: self.cache(geometry) for device in self.devices})
