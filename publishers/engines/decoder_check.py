"""Recognizes the engine that wrote a batch. vLLM's and SGLang's feeds are so alike that each can be read as the other's, with
wrong salts, groups and tiers; so we look for what only one of them writes.

Sources: the event classes of vLLM 0.9 to 0.33 and SGLang 0.4.7 to 0.5.23. Batches of their first versions, with five or six
fields in an array, look the same; only the metrics page distinguishes those.
"""

from typing import Any

import msgpack

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.diagnoses import Diagnoses

_VLLM_NAMES = frozenset({"extra_keys", "group_idx", "kv_cache_spec_kind", "locality"})
_SGLANG_NAMES = frozenset({"cache_salt"})
_STORED_8, _STORED_9, _REMOVED_3 = 8, 9, 3
"""Positions in array events: extra keys (vLLM) or session id (SGLang); group (vLLM) or adapter (SGLang); group (vLLM)."""


def kind_of_batch(payload: bytes) -> EngineKind | None:
    """The engine that wrote a decodable batch; None if it could be either of the two."""
    outer = msgpack.unpackb(payload, strict_map_key=False)
    _, events, *_ = (None, outer.get("events")) if isinstance(outer, dict) else outer
    return next((kind for event in events or () if (kind := _kind_of_event(event)) is not None), None)


def kind_of_page(metrics_page: str) -> EngineKind | None:
    """The engine that wrote this metrics page; None if it has neither engine's metrics."""
    for line in metrics_page.splitlines():
        if line.startswith("vllm:"):
            return EngineKind.VLLM
        if line.startswith("sglang:"):
            return EngineKind.SGLANG
    return None


def diagnose_kind(diagnoses: Diagnoses, kind: EngineKind, found: EngineKind, source: str) -> None:
    """Diagnose a wrong engine kind. `kind`: the configured kind; `found`: the kind that wrote `source`."""
    own = EngineKind.VLLM if kind is EngineKind.MOCK else kind  # the simulated engine speaks vLLM's protocols
    if found is own:
        diagnoses.clear("engine")
    else:
        diagnoses.set(
            "engine", f"{source} is {found.value}'s, but --engine is {kind.value}", f"set --engine {found.value}"
        )


def _kind_of_event(event: Any) -> EngineKind | None:
    if isinstance(event, dict):
        if not _VLLM_NAMES.isdisjoint(event):
            return EngineKind.VLLM
        if not _SGLANG_NAMES.isdisjoint(event):
            return EngineKind.SGLANG
        hashes = event.get("block_hashes")
        # SGLang's are signed; vLLM's were too, until it switched to maps
        negative = isinstance(hashes, list) and any(type(one) is int and one < 0 for one in hashes)
        return EngineKind.SGLANG if negative else _kind_of_hashes(hashes)
    if not isinstance(event, list) or len(event) < 2:
        return None
    tag, hashes, *_ = event
    if tag == "BlockStored" and len(event) > _STORED_8:
        if isinstance(event[_STORED_8], str):
            return EngineKind.SGLANG
        if isinstance(event[_STORED_8], list) or (len(event) > _STORED_9 and type(event[_STORED_9]) is int):
            return EngineKind.VLLM
    if tag == "BlockRemoved" and len(event) > _REMOVED_3 and type(event[_REMOVED_3]) is int:
        return EngineKind.VLLM
    return _kind_of_hashes(hashes)


def _kind_of_hashes(hashes: Any) -> EngineKind | None:
    has_bytes = isinstance(hashes, list) and bool(hashes) and type(hashes[0]) is bytes
    return EngineKind.VLLM if has_bytes else None
