"""What a simulated engine holds, in the words of the index: for tests and tools that compare the two.

No part of an engine's protocols: real engines don't tell this, which is why there are publishers.
"""

from typing import Any

from kvatlas.blocks.hashing import extend_chain
from simulator.cache.block_changes import Medium
from simulator.cache.prefix_tree import PrefixNode
from simulator.engine.scheduler import EngineCore

TIER_OF = {Medium.GPU: "hbm", Medium.CPU: "cpu_dram"}


def resident_blocks(core: EngineCore) -> list[dict[str, Any]]:
    """Every block that a request could use now, once for each tier: `adapter_id`, `tier`, `sequence_hash` (16 digits).

    Computed from the cached tokens, not from the events that were sent. A block whose ancestors are not all held can't
    be used and is left out.
    """
    block_size = core.cache.block_size
    found: list[dict[str, Any]] = []
    waiting: list[tuple[PrefixNode, int | None]] = [(node, None) for node in core.cache.nodes if node.parent is None]
    while waiting:
        node, parent = waiting.pop()
        if not node.resident:
            continue
        salt = node.namespace.cache_salt if parent is None else None
        packed = extend_chain(node.token_ids, block_size, parent, [[salt]] if salt is not None else None)
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
        waiting += [(child, sequence_hash) for child in node.children.values()]
    return found
