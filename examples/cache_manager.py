"""The cache manager alone, without an engine: two devices of 24 blocks, shared prompts, pressure, preemption, clean-up.

    python examples/cache_manager.py

Needs the extra `simulator`; docs/cache-manager.md explains each step.
"""

from kvatlas_simulator.cache import (
    AllocationRequest,
    BlockUse,
    DeviceCaches,
    InsufficientBlocks,
    KVCache,
    KVGeometry,
    MemoryPressure,
    PrefixSettings,
    Priority,
    SequenceNotFound,
)

SYSTEM_PROMPT = list(range(64))


class HitsPerDepth:
    """A custom eviction policy: the deepest of the least-hit blocks goes first."""

    def key(self, use: BlockUse) -> tuple[float, ...]:
        return (use.hits, -use.depth, use.released_at)


def open_device(name: str) -> KVCache:
    def report(before: MemoryPressure, now: MemoryPressure) -> None:
        print(f"{name}: memory pressure {before.label} -> {now.label}")

    return KVCache(
        num_blocks=24,
        block_size=16,
        eviction=HitsPerDepth(),
        num_cpu_blocks=16,
        geometry=KVGeometry(layers=32, heads=8, head_size=128),
        prefixes=PrefixSettings(max_prefixes=8, min_tokens=32, ttl_s=600),
        on_pressure=report,
    )


def main() -> None:
    devices = DeviceCaches({"gpu:0": open_device("gpu:0"), "gpu:1": open_device("gpu:1")})
    gpu = devices.cache("gpu:0")

    request = AllocationRequest(1, SYSTEM_PROMPT + [100] * 32)
    print(f"sequence 1 needs {request.estimated_bytes(gpu.geometry):,} bytes")
    handle = devices.allocate(request, preferred=["gpu:0"])
    devices.extend(1, [7, 8, 9])
    table = handle.block_table()
    print(f"sequence 1: blocks {table.block_ids}, {table.length} tokens, {table.free_tokens} free")

    devices.allocate(AllocationRequest(2, SYSTEM_PROMPT + [200] * 100, priority=Priority.LOW), preferred=["gpu:0"])
    print(f"sequences 1 and 2 share {gpu.shared_blocks(1, 2)} blocks; hit rate {gpu.stats().hit_rate:.2f}")
    gpu.fork(1, 3, blocks=5)
    print(f"sequences 1 and 3 share {gpu.shared_blocks(1, 3)} blocks")

    devices.extend(1, [10] * 140)
    try:
        devices.extend(3, [11] * 80)
    except InsufficientBlocks as error:
        victim = gpu.preemption_order()[0]
        print(f"{error}; sequence {victim} gives way: {gpu.swap_out(victim)} blocks swapped out")
    devices.extend(3, [11] * 80)

    move = devices.rebalance()[0]
    print(f"moved sequence {move.sequence_id} from {move.source} to {move.target}: {move.blocks} blocks")
    print(f"sequence 2 is back, {gpu.swap_in(2)} blocks copied from the CPU")

    for sequence_id in (1, 2, 3):
        devices.free(sequence_id)
    freed = gpu.gc(keep_blocks=6)
    print(f"gc freed {freed.blocks} blocks, {freed.memory_bytes:,} bytes, {freed.prefixes} prefixes")
    done = gpu.defragment()
    print(f"fragmentation {done.fragmentation_before:.2f} -> {done.fragmentation_after:.2f}, {done.moved_blocks} moved")
    try:
        devices.extend(999, [1])
    except SequenceNotFound as error:
        print(error)
    stats = gpu.stats()
    print(
        f"{stats.allocations} allocated, {stats.deallocations} freed, {stats.evictions} evicted, {stats.failures} failed"
    )


if __name__ == "__main__":
    main()
