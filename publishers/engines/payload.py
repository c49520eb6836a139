"""The format that the feeds of vLLM and SGLang share: the outer batch, and events as maps or arrays.

The outer batch is `[ts, events, data_parallel_rank]`, or a map (one released revision of vLLM). Missing and extra trailing
fields are tolerated everywhere. An event is a map with its tag under "type" (vLLM 0.24, SGLang 0.5.20 and later) or an array
`[tag, *fields]`, in which the block hashes come first if the event has any.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvatlas.errors import EngineEventError, InvalidValue, UnknownTier
from kvatlas.msgpack_input import unpack
from kvatlas.validation import MAX_BLOCK_TOKENS
from kvatlas_publishers.engine_events import EngineBatch, EngineDropped, EngineEvent, EngineHash

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
"""The limit is large because SGLang removes a leaf of its tree in one event. With pages of one token, that takes 9
bytes per token of a long prompt."""

Fields = Mapping[str, Any]
"""An event's fields by name. Fields that the event omits are absent."""

_HASH_TYPES = ({int}, {bytes}, {int, bytes})


def decode(
    payload: bytes,
    fields: Mapping[str, Sequence[str]],
    event_of: Callable[[str, Fields], EngineEvent],
) -> EngineBatch:
    """Decode a batch; `event_of(tag, fields)` makes its events. `fields`: for each tag, the order of its fields in an array.

    An event with an unknown tag, or refused by `event_of` with InvalidValue, is skipped and reported. Unless it stores
    blocks or names an unknown tier (whose blocks are never published), it may have removed blocks, so the hashes that it
    names are dropped. If it names none, a known tag makes the batch `lost` up to there, and an unknown tag sets `unknown_at`
    there. Raises EngineEventError if the payload is not a batch.
    """
    try:
        outer = unpack(payload, max_bytes=MAX_PAYLOAD_BYTES, strict_map_key=False)
    except InvalidValue as error:
        raise EngineEventError(f"payload of {error}") from error
    if isinstance(outer, dict):
        outer = [outer.get("ts"), outer.get("events"), outer.get("data_parallel_rank")]
    if not isinstance(outer, list) or len(outer) < 2:
        raise EngineEventError(f"payload is {outer!r:.60}; expected an array of ts, events and rank")
    ts, raw_events, dp_rank, *_ = [*outer, None]
    if type(ts) not in (float, int) or not isinstance(raw_events, list):
        raise EngineEventError(f"batch with ts {ts!r:.40} and events {raw_events!r:.40}; expected seconds and an array")
    if dp_rank is not None and type(dp_rank) is not int:
        raise EngineEventError(f"batch with data_parallel_rank {dp_rank!r:.40}; expected an integer or nil")
    events: list[EngineEvent] = []
    skipped: list[str] = []
    lost, unknown_at = False, None
    for raw in raw_events:
        tag: Any = None
        try:
            if type(raw) is dict:
                tag, named = raw.get("type"), raw
            elif isinstance(raw, list) and raw:
                tag, *values = raw
                named = dict(zip(fields.get(tag, ()) if isinstance(tag, str) else (), values, strict=False))
            else:
                raise EngineEventError(f"event {raw!r:.60}; expected a map or an array")
            if not isinstance(tag, str) or tag not in fields:
                raise EngineEventError(f"unknown event {tag!r:.60}")
            events.append(event_of(tag, named))
        except InvalidValue as error:
            skipped.append(str(error))
            if tag == "BlockStored" or isinstance(error, UnknownTier):
                continue
            if affected := _named_blocks(raw):
                events.append(EngineDropped(affected, None))
            elif isinstance(tag, str) and tag in fields:
                lost, unknown_at = True, None
                events.clear()
            else:
                unknown_at = len(events)
    return EngineBatch(events, float(ts), dp_rank, skipped, lost, unknown_at=unknown_at)


def _named_blocks(raw: Any) -> list[EngineHash]:
    """The block hashes named by an otherwise unreadable event; empty if it names none."""
    match raw:
        case {"block_hashes": list(found)} | [_, list(found), *_]:
            hashes = [one for one in found if type(one) in (int, bytes)]
            return hashes if len(hashes) == len(found) else []
    return []


def hashes_of(tag: str, fields: Fields) -> list[EngineHash]:
    """The event's `block_hashes`, as the engine wrote them. Raises EngineEventError."""
    hashes = fields.get("block_hashes")
    if type(hashes) is list and len(hashes) == 1 and type(hashes[0]) is int:
        return hashes  # vLLM removes blocks one by one
    if not isinstance(hashes, list) or (hashes and set(map(type, hashes)) not in _HASH_TYPES):
        raise EngineEventError(f"{tag} with block_hashes {hashes!r:.60}; expected an array of integers or bytes")
    return hashes


def parent_of(tag: str, fields: Fields) -> EngineHash | None:
    """The event's `parent_block_hash`. Raises EngineEventError."""
    parent = fields.get("parent_block_hash")
    if parent is not None and type(parent) not in (int, bytes):
        raise EngineEventError(f"{tag} with parent_block_hash {parent!r:.60}; expected an integer, bytes or nil")
    return parent


def block_size_of(tag: str, fields: Fields) -> int:
    """The event's `block_size` in tokens; 0 in a placeholder. Raises EngineEventError."""
    block_size = fields.get("block_size", 0)
    if type(block_size) is not int or not 0 <= block_size <= MAX_BLOCK_TOKENS:
        raise EngineEventError(f"{tag} with block_size {block_size!r:.60}; expected 0 to {MAX_BLOCK_TOKENS} tokens")
    return block_size


def tokens_of(tag: str, fields: Fields) -> list[int]:
    """The event's `token_ids`. Raises EngineEventError."""
    tokens = fields.get("token_ids")
    if tokens is None:
        return []
    if not isinstance(tokens, list):
        raise EngineEventError(f"{tag} with token_ids {tokens!r:.60}; expected an array")
    return _integers(tag, tokens)


def tokens_of_pairs(tag: str, fields: Fields) -> tuple[list[int], Sequence[int]]:
    """(the event's `token_ids`, the token after the last block). The second is empty unless tokens come in pairs.

    With EAGLE, SGLang keys its tree by pairs (t[j], t[j+1]): the block at tokens 16..31 has the pairs that *start* there, so
    it covers token 32 too, as vLLM's lookahead hashes do. Raises EngineEventError.
    """
    tokens = fields.get("token_ids")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], list):
        return tokens_of(tag, fields), ()
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in tokens):
        raise EngineEventError(f"{tag} mixes pairs and single tokens in token_ids")
    firsts, seconds = [pair[0] for pair in tokens], [pair[1] for pair in tokens]
    if firsts[1:] != seconds[:-1]:
        raise EngineEventError(f"{tag} has token pairs that don't overlap; expected (a, b), (b, c) and so on")
    _integers(tag, seconds)
    return _integers(tag, firsts), seconds[-1:]


def _integers(tag: str, tokens: list[Any]) -> list[int]:
    """The tokens, unchanged. Raises EngineEventError if any of them is not an integer."""
    try:
        integers = type(sum(tokens)) is int  # three times as fast as checking each one's type
    except TypeError:
        integers = False
    if not integers:
        raise EngineEventError(f"{tag} has a token id that is not an integer")
    return tokens


def text_of(tag: str, fields: Fields, name: str) -> str | None:
    """A field that is text or nil; empty text counts as nil. Raises EngineEventError."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise EngineEventError(f"{tag} with {name} {value!r:.60}; expected text or nil")
    return value or None


def is_adapter_named(fields: Fields) -> bool:
    """False if the event identifies an adapter only by its id."""
    return bool(fields.get("lora_name")) or fields.get("lora_id") in (None, "")


def adapter_of(tag: str, fields: Fields) -> str | None:
    """The adapter's name: `lora_name`, or `lora_id` as text if there is no name. Raises EngineEventError."""
    name = text_of(tag, fields, "lora_name")
    if name is not None:
        return name
    lora_id = fields.get("lora_id")
    if lora_id is not None and type(lora_id) not in (int, str):
        raise EngineEventError(f"{tag} with lora_id {lora_id!r:.60}; expected an integer, text or nil")
    return None if lora_id is None or lora_id == "" else str(lora_id)
