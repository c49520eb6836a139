"""Decodes the open event forms (`open_models`), JSON or msgpack, of engines and tools other than vLLM and SGLang.

    {engine_id, ts_ms?, ..., events: [{type: block_stored | block_removed | all_blocks_cleared, ...}]}
    {events: [{event_id, data: {stored: {parent_hash?, blocks}} | {removed: {block_hashes}} | "cleared"}], shutdown}

Decisions that the forms leave open:
- A tier holds a block once: two reports of it are not two copies (`LedgerSettings.set_semantics`).
- A removal without a medium removes the block from all tiers. A stored block without a medium is in device memory.
- Text of 16 lower-case hex digits is the same block hash as the integer it spells; a negative integer is the same as its 64
  bits unsigned.
- If an engine never reports token ids, its blocks are keyed by their hashes (`kvatlas.blocks.external_chain`); each chain
  starts at "root" or at its session.
- The router protocol has no block size; the publisher's setting applies.
- A batch's tenant applies to its stored blocks. Without one, a block gets its parent's tenant; a root, the publisher's.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from kvatlas.blocks.external_chain import MAX_HASH, ROOT, hash_text, name_hash
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.errors import EngineEventError, InvalidValue, UnknownTier
from kvatlas.identity import DEFAULT_EXTERNAL_CHAIN
from kvatlas.msgpack_input import MAX_OTHER_VALUES, unpack
from kvatlas.validation import describe_mistake
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineDropped,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    LocalHashes,
    OpenHeader,
)
from kvatlas_publishers.engines.open_models import (
    ENGINE_EVENT,
    AllBlocksCleared,
    BatchFields,
    BlockRemoved,
    BlockStored,
    RemovedData,
    RouterEvent,
    RouterFields,
    StoredData,
)
from kvatlas_publishers.engines.payload import MAX_PAYLOAD_BYTES

_JSON_STARTS = b"{[ \t\r\n"
"""No msgpack batch begins with one of these bytes, because it is a map."""
_HEX_DIGITS = frozenset("0123456789abcdef")
_ALL_TIERS = tuple(Tier)
_REMOVALS = ("block_removed", "all_blocks_cleared")


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode a payload in either form, JSON or msgpack. Raises EngineEventError if it is not a batch."""
    try:
        return batch_of(_parse(payload))
    except RecursionError as error:
        raise EngineEventError(f"payload of {len(payload)} bytes is nested too deeply") from error


def batch_of(raw: Any) -> EngineBatch:
    """A batch in either form, given as JSON types. `EngineBatch.skipped` lists unreadable events; `engines.payload.decode`
    explains which of them make the batch lost. Raises EngineEventError if it is not a batch."""
    raw_events = raw.get("events") if isinstance(raw, dict) else None
    if not isinstance(raw_events, list):
        raise EngineEventError(f"batch is {raw!r:.60}; expected an object with events")
    numbered = "engine_id" not in raw and (
        "shutdown" in raw or any(isinstance(one, dict) and "event_id" in one for one in raw_events)
    )
    try:
        fields = RouterFields.model_validate(raw) if numbered else BatchFields.model_validate(raw)
    except ValidationError as error:
        raise EngineEventError(_mistake("batch", error)) from error
    if isinstance(fields, RouterFields):
        return _numbered_batch(raw_events, fields)
    events: list[EngineEvent] = []
    skipped: list[str] = []
    lost, unknown_at = False, None
    for one in raw_events:
        try:
            events.append(_event(one, fields))
        except (InvalidValue, ValidationError) as error:
            skipped.append(_why_skipped(error))
            if _can_only_store(one) or isinstance(error, UnknownTier):
                continue
            if affected := _named_blocks(one):
                events.append(EngineDropped(affected, None))
            elif isinstance(one, dict) and one.get("type") in _REMOVALS:
                lost, unknown_at = True, None
                events.clear()
            else:
                unknown_at = len(events)
    header = OpenHeader(fields.engine_id, fields.model_id, fields.tokenizer_id, load=fields.load)
    return EngineBatch(events, (fields.ts_ms or 0.0) / 1e3, None, skipped, lost, header, unknown_at)


def _parse(payload: bytes) -> Any:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EngineEventError(f"payload has {len(payload)} bytes; expected at most {MAX_PAYLOAD_BYTES}")
    if payload[:1] not in _JSON_STARTS or not payload:
        try:
            return unpack(payload, max_bytes=MAX_PAYLOAD_BYTES, strict_map_key=False)
        except InvalidValue as error:
            if payload[:1] >= b"\x80":
                raise EngineEventError(f"payload of {error}") from error
            raise EngineEventError(f"payload of {len(payload)} bytes is neither JSON nor msgpack") from error
    if payload.count(b"[") + payload.count(b"{") > MAX_OTHER_VALUES:  # an empty one grows from 2 bytes to 64
        raise EngineEventError(f"payload has more than {MAX_OTHER_VALUES} arrays and objects")
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise EngineEventError(f"payload of {len(payload)} bytes is not JSON: {error!s:.80}") from error


def _can_only_store(raw: Any) -> bool:
    """True if an unreadable event can only store blocks, so that it can't have removed any."""
    if not isinstance(raw, dict):
        return False
    data = raw.get("data")
    return raw.get("type") == "block_stored" or (isinstance(data, dict) and data.keys() == {"stored"})


def _named_blocks(raw: Any) -> list[EngineHash]:
    """The block hashes named by an otherwise unreadable event; empty if it names none, or any of another type."""
    named = raw.get("block_hashes") if isinstance(raw, dict) else None
    if not isinstance(named, list) or any(type(one) not in (int, str) for one in named):
        return []
    return [_engine_hash(one) for one in named]


# ---------------------------------------------------------------- an engine's events


def _event(raw: Any, batch: BatchFields) -> EngineEvent:
    match ENGINE_EVENT.validate_python(raw):
        case BlockStored() as stored:
            return _stored(stored, batch)
        case BlockRemoved() as removed:
            hashes = [_engine_hash(one) for one in removed.block_hashes]
            group = removed.group_idx or 0
            if removed.medium is None:
                return EngineDropped(hashes, group)
            return EngineRemoved(hashes, parse_tier(removed.medium), group)
        case AllBlocksCleared():
            return EngineCleared(_ALL_TIERS)


def _stored(stored: BlockStored, batch: BatchFields) -> EngineStored:
    hashes = [_engine_hash(one) for one in stored.block_hashes]
    parent = None if stored.parent_block_hash is None else _engine_hash(stored.parent_block_hash)
    if parent in (ROOT.encode(), None if stored.session_id is None else _engine_hash(stored.session_id)):
        parent = None
    local_hashes = None
    if not stored.token_ids:
        names = [name_hash(_name(one)) for one in hashes]
        local_hashes = LocalHashes(names, DEFAULT_EXTERNAL_CHAIN, name_hash(stored.session_id or ROOT))
    return EngineStored(
        hashes=hashes,
        parent=parent,
        token_ids=stored.token_ids or (),
        block_size=stored.block_size,
        tier=Tier.HBM if stored.medium is None else parse_tier(stored.medium),
        group=stored.group_idx or 0,
        adapter=stored.lora_name or batch.adapter_id,
        salt=batch.tenant_id,
        salt_inherited=batch.tenant_id is None,
        local_hashes=local_hashes,
        block_bytes=stored.bytes_per_block or batch.bytes_per_block or 0,
    )


def _engine_hash(told: int | str) -> EngineHash:
    """The single name of a block, whatever the form of its hash."""
    if isinstance(told, int):
        return told & MAX_HASH
    return int(told, 16) if len(told) == 16 and _HEX_DIGITS.issuperset(told) else told.encode()


def _name(block_hash: EngineHash) -> str:
    """The hash as text, in the form that external chains use."""
    return hash_text(block_hash) if isinstance(block_hash, int) else block_hash.decode()


# ---------------------------------------------------------------- the router protocol


def _numbered_batch(raw_events: Sequence[Any], fields: RouterFields) -> EngineBatch:
    """The batch's events with their ids. An unreadable event keeps its id if it can only store; otherwise its id is left out,
    which counts as a gap."""
    events: list[EngineEvent] = []
    event_ids: list[tuple[int, bytes]] = []
    skipped: list[str] = []
    ranks: set[int] = set()
    lost = False
    for one in raw_events:
        try:
            read = RouterEvent.model_validate(one)
        except ValidationError as error:
            skipped.append(_why_skipped(error))
            event_id = one.get("event_id") if isinstance(one, dict) else None
            if not _can_only_store(one) or type(event_id) is not int or not 0 <= event_id <= MAX_HASH:
                lost = True
                continue
            event: EngineEvent = EngineStored((), None, (), 0)
        else:
            event_id, event = read.event_id, _numbered_event(read)
            ranks |= {read.dp_rank} if read.dp_rank is not None else set()
        events.append(event)
        event_ids.append((event_id, repr(one).encode()))
    if len(ranks) > 1:
        raise EngineEventError(f"batch has events of dp_rank {', '.join(map(str, sorted(ranks)))}; expected one rank")
    header = OpenHeader(event_ids=event_ids, shutdown=fields.shutdown, load=fields.load)
    return EngineBatch(events, 0.0, ranks.pop() if ranks else None, skipped, lost, header=header)


def _numbered_event(event: RouterEvent) -> EngineEvent:
    """One event of the router protocol. A stored event gets block size 0, which stands for the publisher's block
    size."""
    data = event.data
    if isinstance(data, StoredData):
        blocks, parent = data.stored.blocks, data.stored.parent_hash
        return EngineStored(
            hashes=[one.block_hash & MAX_HASH for one in blocks],
            parent=None if parent is None else parent & MAX_HASH,
            token_ids=(),
            block_size=0,
            local_hashes=LocalHashes([one.tokens_hash & MAX_HASH for one in blocks]),
        )
    if isinstance(data, RemovedData):
        return EngineDropped([one & MAX_HASH for one in data.removed.block_hashes])
    return EngineCleared(_ALL_TIERS)


def _why_skipped(error: InvalidValue | ValidationError) -> str:
    return str(error) if isinstance(error, InvalidValue) else _mistake("event", error)


def _mistake(what: str, error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"] if "constrained" not in str(part))
    return describe_mistake(f"{what} {path}" if path else what, first)
