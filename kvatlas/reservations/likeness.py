"""Likeness: workers on which a request costs the same, apart from their load and from the blocks that they hold.

A router that looks for the cheapest of a thousand workers names a likeness instead of its workers, and the store keeps the
workers of that likeness sorted by load. Indexers, which report workers, and routers must therefore agree on the likeness. It
depends only on the fleet record, not on a router's settings. Workers that differ only in a router's settings (rates, reuse
rules) have the same likeness.

Look-alikes with equal costs are placed on a **ring**, according to the first 32 bits of the SHA-1 of their ids. A prompt goes
to the next worker after its own place, so different prompts are spread out, and identical prompts go to the same worker.
"""

from functools import lru_cache
from hashlib import sha1

import msgpack

from kvatlas.fleet.records import FleetRecord

LIKENESS_BYTES = 8
RING = 1 << 32


def likeness_of(record: FleetRecord) -> bytes:
    """The likeness of a worker, 8 bytes; empty for a worker that currently gets no requests."""
    if not record.routable:
        return b""
    endpoint = record.endpoint
    # predictions for a worker without events are limited by the size of its cache
    cache_blocks = record.load.forward_pass.total_kv_blocks if record.load and not endpoint.events else 0
    return _hash(
        endpoint.kind.value,
        endpoint.role.value,
        endpoint.locality_domain,
        endpoint.transfer_groups,
        endpoint.block_size or 0,
        endpoint.block_bytes,
        endpoint.granularity,
        endpoint.eagle,
        endpoint.events,
        cache_blocks,
        *endpoint.stores,  # if there are no stores, the bytes are the same as in versions that don't know them
        *([record.tenants] if record.tenants else []),  # likewise
        *([endpoint.kv_connector.value] if endpoint.kv_connector else []),
        *([tuple(sorted(endpoint.tier_block_bytes.items()))] if endpoint.tier_block_bytes else []),
    )


def place_on_ring(worker_id: str) -> int:
    """A worker's place: 0 to RING - 1."""
    return int.from_bytes(sha1(worker_id.encode(), usedforsecurity=False).digest()[:4], "big")


@lru_cache(maxsize=4_096)
def _hash(*fields: object) -> bytes:
    return sha1(msgpack.packb(fields), usedforsecurity=False).digest()[:LIKENESS_BYTES]
