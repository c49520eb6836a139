"""KV events of Mooncake's master (in the envelope of its RFC 1527, which mooncake_master has published since July 2026) about
objects that the store received and evicted.

    ZMQ [topic, seq (from 1), payload]; payload: msgpack [ts in ms, events, dp_rank]
    event: {event_type: stored | removed | cleared, event_id, tenant_id, backend_id, medium, seq_hashes, object_key?,
            model_name?, lora_name?, parent_hash?, base_block_idx?, token_ids?, block_size?, group_id?, ...}

Decisions that the wire leaves open:
- `seq_hashes` are rolling sequence hashes like ours (XXH3-64). The master takes them from object keys that consist of one
  number. Other keys (an engine's own hashes) can't be matched to a prompt; such an event is skipped and reported.
- The master knows neither parents nor tokens, so its stored blocks are additional copies of known ones. It has no replay.
- The loss of one of several replicas is not reported, so a removal means that the whole store lost the object.
"""

from typing import Any, NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import EngineEventError, InvalidValue
from kvatlas.msgpack_input import unpack
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.engines.payload import MAX_PAYLOAD_BYTES

TIER = Tier.OBJECT_STORE
_MAX_HASH = (1 << 64) - 1
_SEPARATOR = "\0"


class ObjectName(NamedTuple):
    """The identity of an object's block. `model` and `adapter` are empty if the event names none; `hash`: packed sequence
    hash."""

    model: str
    adapter: str
    tenant: str
    hash: bytes

    def pack(self) -> bytes:
        """This name as an engine hash."""
        return _SEPARATOR.join((self.model, self.adapter, self.tenant, "")).encode() + self.hash

    @classmethod
    def unpack(cls, packed: bytes) -> "ObjectName":
        """The inverse of `pack`."""
        model, adapter, tenant, _ = packed[:-HASH_BYTES].decode().split(_SEPARATOR)
        return cls(model, adapter, tenant, packed[-HASH_BYTES:])


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode one ZMQ payload; its hashes are packed `ObjectName`s. Raises EngineEventError if it is not a batch."""
    try:
        outer = unpack(payload, max_bytes=MAX_PAYLOAD_BYTES, strict_map_key=False)
    except InvalidValue as error:
        raise EngineEventError(f"payload of {error}") from error
    ts_ms, raw_events, *_ = outer if isinstance(outer, list) and len(outer) >= 2 else (None, None)
    if type(ts_ms) is not int or not isinstance(raw_events, list):
        raise EngineEventError(f"payload is {outer!r:.60}; expected an array of milliseconds, events and rank")
    events: list[EngineEvent] = []
    skipped: list[str] = []
    lost = False
    for raw in raw_events:
        try:
            events.append(_event(raw))
        except EngineEventError as error:
            skipped.append(str(error))
            if not (isinstance(raw, dict) and (raw.get("event_type") == "stored" or raw.get("seq_hashes") == [])):
                lost = True
                events.clear()
    return EngineBatch(events, ts_ms / 1e3, None, skipped, lost)


def _event(raw: Any) -> EngineEvent:
    kind = raw.get("event_type") if isinstance(raw, dict) else None
    if kind == "cleared":
        return EngineCleared((TIER,))
    if kind not in ("stored", "removed"):
        raise EngineEventError(f"event {raw!r:.60}; expected event_type stored, removed or cleared")
    hashes = raw.get("seq_hashes")
    if not isinstance(hashes, list) or any(type(one) is not int or not 0 <= one <= _MAX_HASH for one in hashes):
        raise EngineEventError(f"{kind} with seq_hashes {hashes!r:.60}; expected an array of 64-bit integers")
    if not hashes:
        key = raw.get("object_key")
        raise EngineEventError(f"{kind} object {key!r:.80}: its key is not a sequence hash, so its block is unknown")
    model, adapter, tenant = (_text(kind, raw, name) for name in ("model_name", "lora_name", "tenant_id"))
    names = [ObjectName(model, adapter, tenant, one.to_bytes(HASH_BYTES, "little")).pack() for one in hashes]
    if kind == "removed":
        return EngineRemoved(names, TIER)
    return EngineStored(names, None, (), 0, TIER)


def _text(kind: str, raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is not None and (not isinstance(value, str) or _SEPARATOR in value):
        raise EngineEventError(f"{kind} with {name} {value!r:.60}; expected text or nil")
    return value or ""
