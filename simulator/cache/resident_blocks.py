"""The content of a simulated engine, in the terms of the index, for tests and tools that compare the two.

Real engines can't be asked for their content, which is why publishers exist.
"""

from typing import Any

from kvatlas.blocks.hashing import extend_chain
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import Medium
from kvatlas_simulator.cache.prefix_tree import PrefixNode

TIER_OF = {Medium.GPU: "hbm", Medium.CPU: "cpu_dram"}


def list_resident_blocks(cache: KVCache) -> list[dict[str, Any]]:
    """Every block that a request could use now, once per tier: `adapter_id`, `tier`, `sequence_hash` (16 digits).

    Computed from the cached tokens, not from the events. Leaves out a block whose ancestor is missing, because no request
    can use it.
    """
    found: list[dict[str, Any]] = []
    pending: list[tuple[PrefixNode, int | None]] = [(node, None) for node in cache.nodes if node.parent is None]
    while pending:
        node, parent_hash = pending.pop()
        if not node.resident:
            continue
        salt = node.namespace.cache_salt if parent_hash is None else None
        packed = extend_chain(node.token_ids, cache.block_size, parent_hash, [[salt]] if salt is not None else None)
        sequence_hash = int.from_bytes(packed, "little")
        media = [Medium.GPU] * bool(node.gpu_block_ids) + [Medium.CPU] * node.on_cpu
        for medium in media:
            found.append(
                {
                    "adapter_id": node.namespace.adapter,
                    "tier": TIER_OF[medium],
                    "sequence_hash": f"{sequence_hash:016x}",
                }
            )
        pending += [(child, sequence_hash) for child in node.children.values()]
    return found
