"""A cache manager's interface: tables, requests, statistics, its raw allocator, its settings, and changes at run time."""

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache import (
    AllocationRequest,
    BlockAllocator,
    BlockTable,
    CacheConfig,
    DeviceCaches,
    InsufficientBlocks,
    KVCache,
    KVGeometry,
    MemoryPressure,
    PoolSettings,
    PrefixSettings,
    SequenceTooLong,
)

GEOMETRY = KVGeometry(layers=2, heads=4, head_size=8)
BLOCK_BYTES = GEOMETRY.bytes_of(4)


def test_a_table_maps_its_blocks_and_knows_whether_one_is_free() -> None:
    table = BlockTable(4, [7, 3, 9], 8)
    assert table.logical_to_physical == {0: 7, 1: 3, 2: 9}
    assert table.has_free_space and table.free_tokens == 4
    table.length = 9
    assert not table.has_free_space and table.free_tokens == 3
    assert not BlockTable(4).has_free_space


def test_a_handles_table_is_a_copy() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    handle = cache.allocate(AllocationRequest("a", range(8)))
    handle.block_table().block_ids.clear()
    assert len(handle.block_table()) == 2


def test_a_request_says_its_longest_and_its_device() -> None:
    request = AllocationRequest("a", [1, 2], max_tokens=5, device="gpu:1")
    assert request.estimated_bytes(GEOMETRY) == GEOMETRY.bytes_of(5)
    caches = DeviceCaches({name: KVCache(num_blocks=2, block_size=4) for name in ("gpu:0", "gpu:1")})
    caches.allocate(request, preferred=["gpu:0"])
    assert caches.device_of("a") == "gpu:1"
    caches.extend("a", [3, 4])
    caches.move("a", "gpu:0")
    caches.cache_of("a").fork("a", "b")
    for name in ("a", "b"):
        with pytest.raises(SequenceTooLong, match=f"sequence {name} would have 6 tokens; its max_tokens is 5"):
            caches.extend(name, [5, 6])
        assert len(caches.cache_of(name).read(name)) == 4
    with pytest.raises(InvalidValue, match="max_tokens is 1; its prompt has 2"):
        AllocationRequest("a", [1, 2], max_tokens=1)


def test_totals_are_of_all_blocks_and_collection_says_its_time() -> None:
    cache = KVCache(num_blocks=8, block_size=4, geometry=GEOMETRY)
    cache.allocate(AllocationRequest("a", range(8)))
    stats = cache.stats()
    assert (stats.total_memory_bytes, stats.memory_bytes) == (8 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    cache.free("a")
    collected = cache.gc(keep_blocks=0)
    assert (collected.blocks, collected.memory_bytes) == (2, 2 * BLOCK_BYTES) and collected.time_ms > 0


def test_the_function_that_hears_of_pressure_is_set_while_sequences_live() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    cache.allocate(AllocationRequest("a", range(8)))
    heard: list[MemoryPressure] = []
    cache.on_pressure = lambda before, now: heard.append(now)
    cache.extend("a", range(8, 12))
    cache.free("a")
    assert heard == [MemoryPressure.MEDIUM, MemoryPressure.LOW]


@pytest.mark.parametrize(("pooling", "left"), [(True, 5), (False, 3)])
def test_memory_is_reserved_as_needed_and_kept_with_pooling(pooling: bool, left: int) -> None:
    cache = KVCache(num_blocks=8, block_size=4, geometry=GEOMETRY, pool=PoolSettings(3, pooling))
    reserved = [cache.stats().reserved_memory_bytes]
    cache.allocate(AllocationRequest("a", range(20)))
    reserved.append(cache.stats().reserved_memory_bytes)
    cache.free("a")
    cache.gc(keep_blocks=0)
    reserved.append(cache.stats().reserved_memory_bytes)
    assert reserved == [3 * BLOCK_BYTES, 5 * BLOCK_BYTES, left * BLOCK_BYTES]
    assert (
        KVCache(num_blocks=8, block_size=4).stats().reserved_memory_bytes
        == KVCache(num_blocks=8, block_size=4).stats().total_memory_bytes
    )


def test_prefix_caching_is_switched_at_run_time() -> None:
    cache = KVCache(num_blocks=16, block_size=4, prefixes=PrefixSettings(sharing=False))
    prompt = list(range(12))

    def hits() -> int:
        before = cache.stats().hits
        cache.allocate(AllocationRequest("probe", [*prompt, 99]))
        cache.free("probe")
        return cache.stats().hits - before

    cache.allocate(AllocationRequest("a", prompt))
    assert hits() == 0
    cache.set_prefixes(PrefixSettings())
    cache.extend("a", [50])  # its full blocks are cached now
    assert hits() == 3
    cache.set_prefixes(PrefixSettings(sharing=False))
    assert hits() == 0
    cache.set_prefixes(PrefixSettings(max_prefixes=1))
    assert hits() == 3 and cache.stats().cached_prefixes == 1


def test_a_raw_allocator_gives_blocks_and_takes_them_back() -> None:
    blocks = BlockAllocator(4, 16, PoolSettings(1))
    first = blocks.allocate(3)
    assert (first, blocks.free_blocks, blocks.total_blocks, blocks.block_size) == ([0, 1, 2], 1, 4, 16)
    with pytest.raises(InsufficientBlocks, match="need 2, have 1"):
        blocks.allocate(2)
    for wrong in ([3], [0, 0], [0, 9], [-1]):
        with pytest.raises(InvalidValue, match="is not allocated, or freed twice"):
            blocks.free(wrong)
    assert blocks.free_blocks == 1
    blocks.free([0, 1])
    assert 0 not in blocks and 2 in blocks
    assert blocks.defragment() == {2: 0} and 0 in blocks and 2 not in blocks
    assert (blocks.free_blocks, blocks.reserved_blocks) == (3, 3)


def test_the_usual_settings_as_one_value() -> None:
    config = CacheConfig()
    cache = config.cache()
    assert (cache.block_size, cache.num_blocks, config.initial_blocks, config.pooling) == (16, 1_000, 100, True)
    assert (config.devices, config.prefix_caching, config.multi_device) == (("cpu",), False, False)
    stats = cache.stats()
    assert stats.reserved_memory_bytes * 10 == stats.total_memory_bytes
    cache.allocate(AllocationRequest("a", range(32)))
    cache.free("a")
    assert cache.stats().cached_blocks == 0  # prefixes are not cached unless asked for
    two = CacheConfig(devices=("gpu:0", "gpu:1"), multi_device=True, prefix_caching=True).device_caches()
    assert two.devices == ("gpu:0", "gpu:1")
    with pytest.raises(InvalidValue, match="2 devices"):
        CacheConfig(devices=("gpu:0", "gpu:1"))
