"""Decoded batches of events as engines pack them."""

from typing import Any

import msgpack

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engines import decode_batch

BOTH = [EngineKind.VLLM, EngineKind.SGLANG]


def batch(*events: Any, kind: EngineKind = EngineKind.VLLM, rank: int | None = 0) -> Any:
    return decode_batch(kind, msgpack.packb([12.5, list(events), rank]))


def only(*events: Any, kind: EngineKind = EngineKind.VLLM) -> Any:
    decoded = batch(*events, kind=kind)
    assert not decoded.skipped
    (event,) = decoded.events
    return event


def stored(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    } | fields
