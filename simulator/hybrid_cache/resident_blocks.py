"""The content of a hybrid engine, in the index's terms: `kvatlas_simulator.cache.resident_blocks` for groups."""

from collections import defaultdict
from typing import Any

from kvatlas.blocks.hashing import extend_chain
from kvatlas_simulator.cache.kv_events import Medium
from kvatlas_simulator.cache.resident_blocks import TIER_OF
from kvatlas_simulator.hybrid_cache.block_pool import Content
from kvatlas_simulator.hybrid_cache.cache import HybridCache, extend_runs


def list_hybrid_blocks(cache: HybridCache) -> list[dict[str, Any]]:
    """Every block of full attention after which a prompt could continue: `adapter_id`, `tier`, `sequence_hash` (16 digits), and
    `resumable` (every group has what it needs there).

    Computed from the cached tokens, not from the events. Leaves out a block whose ancestor is missing.
    """
    children: dict[int | None, list[Content]] = defaultdict(list)
    for content in cache.contents:
        children[content.parent_hash].append(content)
    found: list[dict[str, Any]] = []
    before = (0,) * len(cache.groups)
    pending: list[tuple[Content, int, int | None, tuple[int, ...]]] = [
        (root, 1, None, before) for root in children[None]
    ]
    while pending:
        content, position, parent_hash, runs = pending.pop()
        if not cache.is_resident(content):
            continue
        runs = extend_runs(runs, content)
        salt = content.namespace.cache_salt if parent_hash is None else None
        packed = extend_chain(content.token_ids, cache.block_size, parent_hash, [[salt]] if salt is not None else None)
        sequence_hash = int.from_bytes(packed, "little")
        found.append(
            {
                "adapter_id": content.namespace.adapter,
                "tier": TIER_OF[Medium.GPU],
                "sequence_hash": f"{sequence_hash:016x}",
                "resumable": cache.allows(position, runs),
            }
        )
        pending += [(child, position + 1, sequence_hash, runs) for child in children[content.block_hash]]
    return found
