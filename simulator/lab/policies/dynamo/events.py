"""The engines' events in the format that Dynamo reads: vLLM's, with blocks of real size."""

from collections.abc import Sequence
from typing import Any

import msgpack
import xxhash

from kvatlas_simulator.cache.kv_events import BlockRemoved, GpuCleared, KVEvent
from kvatlas_simulator.lab.requests import DEFAULT_IDENTITY, Identity

_MARK = 0xFFFF_FFFF


def encode_batch(events: Sequence[dict[str, Any]]) -> bytes:
    """The payload of one message."""
    payload: bytes = msgpack.packb([0.0, events, None])
    return payload


def encode_event(event: KVEvent, block_tokens: int) -> dict[str, Any]:
    """An event for Dynamo. All tokens of a block are its content's id."""
    if isinstance(event, GpuCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        return removed(event.block_hash, event.medium)
    identity = Identity(event.adapter) if event.salt is None else Identity(event.adapter, event.salt)
    tokens = [token_of(content, identity) for content in event.token_ids[::2] for _ in range(block_tokens)]
    return stored(event.block_hashes, event.parent_hash, tokens, block_tokens, event.medium)


def stored(
    hashes: Sequence[int], parent: int | None, tokens: Sequence[int], block_tokens: int, medium: str = "GPU"
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_tokens,
        "medium": medium,
    }


def removed(block_hash: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": medium}


def mark_tokens(mark: int, block_tokens: int) -> list[int]:
    """Tokens of a block that no content has, because they differ from each other."""
    return [mark, *[_MARK] * (block_tokens - 1)]


def mark_hash(mark: int) -> int:
    return xxhash.xxh3_64_intdigest(f"mark {mark}".encode()) | 1


def token_of(content: int, identity: Identity) -> int:
    """The token of a block. Dynamo's service knows neither tenants nor adapters, so the blocks of different ones get
    different tokens."""
    if identity == DEFAULT_IDENTITY:
        return content
    return xxhash.xxh32_intdigest(repr((content, identity)).encode())
