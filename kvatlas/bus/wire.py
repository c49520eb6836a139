"""The bus message: msgpack `[version, worker_id, incarnation, seq, ts_us, scopes, events]`.

`scopes` maps each scope id used to `[model_id, tokenizer_id, adapter_id, tenant_id, block_size, block_bytes]`. An event is
an array with its code first; hashes are packed (8 little-endian bytes each), so no later step does any work per block:

    [1, scope id, tier, hashes, parent or nil, first index, 0]       stored          [4]                   snapshot begin
    [2, scope id, tier, hashes]                                     removed         [5, as stored]        snapshot chunk
    [3]                                                             cleared         [6, chunks, digest]   snapshot end
                                                                                    [7, digest]           checkpoint

Version 2 adds the following, for workers whose residency does not show where a prompt can resume (hybrid models):

    [4, dropped]                    snapshot begin  [8, scope id, hashes]           marked
    [6 and 7, with a digest of 21 words]            [9, scope id, hashes]           unmarked
                                                    [10, scope id, hashes, bits]    heads (8 big-endian bytes of bits each)

Version 3 adds the chain as a seventh scope field, for scopes whose keys belong to a different chain
(`kvatlas.identity.Scope.chain`). Version 4 adds an eighth field, for workers whose blocks have a different size in some tiers:
`{tier: bytes per block}`. `block_bytes` applies to all tiers that are not listed there (`kvatlas.blocks.block_sizes`).

Messages that need none of these stay at version 1, so an indexer that only knows version 1 can keep serving all other workers.
The work that a message causes is bounded: apart from its hashes, it has at most one begin, one end and one cleared event.
"""

from typing import Any

import msgpack

from kvatlas.blocks.block_sizes import BlockSizes, in_order
from kvatlas.blocks.digest import MARK_WORDS, WORDS
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue, WireError
from kvatlas.events import (
    Checkpoint,
    Cleared,
    Heads,
    IndexEvent,
    Marked,
    Message,
    Removed,
    ScopeUse,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stored,
    Unmarked,
)
from kvatlas.identity import OWN_CHAIN, SCOPE_ID_BYTES, Scope, check_worker_id
from kvatlas.msgpack_input import unpack
from kvatlas.validation import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS

MESSAGE_VERSION, WORKER_ID, INCARNATION, SEQ, TS_US, SCOPES, EVENTS = range(7)
"""Indexes of a message's fields."""
BLOCK_SIZE, BLOCK_BYTES, CHAIN, TIER_BYTES = 4, 5, 6, 7
"""Indexes of a scope entry's fields after the four names. The last two are present only if needed."""
CODE, SCOPE_ID, TIER, HASHES, PARENT, FIRST_INDEX, RESERVED = range(7)
"""Indexes of an event's fields; a removed event ends with its hashes."""
CHUNKS, END_DIGEST = 1, 2
"""Indexes of a snapshot end's fields after its code."""
CHECKPOINT_DIGEST = 1
"""Index of a checkpoint's field after its code."""
DROPPED = 1
"""Index of a snapshot begin's field after its code, for a worker with marks."""
MARK_HASHES, HEAD_BITS = 2, 3
"""Indexes of the last fields of marked, unmarked and heads; the scope id comes first."""

VERSION = 1
VERSION_WITH_MARKS = 2
VERSION_WITH_CHAINS = 3
VERSION_WITH_TIER_BYTES = 4
MAX_DROPPED = 255
MAX_MESSAGE_BYTES = 512 * 1024
MAX_SNAPSHOT_MESSAGE_BYTES = 64 * 1024
"""Largest snapshot message that publishers send: the store serves no other client while it applies one."""
MAX_INCARNATION = (1 << 64) - 1
MAX_SEQ = (1 << 53) - 1

STORED, REMOVED, CLEARED, BEGIN, CHUNK, END, CHECKPOINT, MARKED, UNMARKED, HEADS = range(1, 11)
"""Event codes."""
LAST_CODE = {VERSION: CHECKPOINT, VERSION_WITH_MARKS: HEADS, VERSION_WITH_CHAINS: HEADS, VERSION_WITH_TIER_BYTES: HEADS}

_WITH_HASHES = frozenset((STORED, CHUNK, REMOVED))
_AT_MOST_ONE = (CLEARED, BEGIN, END)
_OF_MARKS = frozenset((MARKED, UNMARKED, HEADS))
_TIERS = len(Tier)

RawMessage = list[Any]
"""A decoded and checked message, as the arrays that came over the wire (the indexer builds no objects). Read it with the
indexes above."""


def encode(message: Message) -> bytes:
    """The message, encoded as bytes. The sender must observe MAX_MESSAGE_BYTES (see `kvatlas_publishers.stream.outbox`)."""
    scopes = {
        scope_id: [
            use.scope.model_id,
            use.scope.tokenizer_id,
            use.scope.adapter_id,
            use.scope.tenant_id,
            use.block_size,
            use.block_bytes,
            *([] if use.scope.chain == OWN_CHAIN and not use.tier_bytes else [use.scope.chain]),
            *([{int(tier): size for tier, size in use.tier_bytes}] if use.tier_bytes else []),
        ]
        for scope_id, use in message.scopes.items()
    }
    events = [_encode_event(event) for event in message.events]
    version = VERSION_WITH_MARKS if any(map(_needs_marks, message.events)) else VERSION
    if any(len(entry) > CHAIN for entry in scopes.values()):
        version = VERSION_WITH_CHAINS
    if any(use.tier_bytes for use in message.scopes.values()):
        version = VERSION_WITH_TIER_BYTES
    return msgpack.packb([version, message.worker_id, message.incarnation, message.seq, message.ts_us, scopes, events])


def decode_raw(payload: bytes) -> RawMessage:
    """The checked arrays of a message. Raises WireError, naming the fault, for bytes that are not a message.

    The work is per event, never per block.
    """
    try:
        raw = unpack(payload, max_bytes=MAX_MESSAGE_BYTES, strict_map_key=False)
    except InvalidValue as error:
        raise WireError(f"message of {error}") from error
    if not isinstance(raw, list) or not raw:
        raise WireError(f"message is {type(raw).__name__}; expected an array")
    if type(raw[MESSAGE_VERSION]) is not int or raw[MESSAGE_VERSION] not in LAST_CODE:
        raise WireError(
            f"message version {raw[MESSAGE_VERSION]!r:.40}; expected {VERSION} to {VERSION_WITH_TIER_BYTES}"
        )
    if len(raw) != 7:
        raise WireError(f"message has {len(raw)} fields; expected 7")
    version, worker_id, incarnation, seq, ts_us, scopes, events = raw
    try:
        check_worker_id(worker_id)
    except InvalidValue as error:
        raise WireError(str(error)) from error
    if type(incarnation) is not int or not 1 <= incarnation <= MAX_INCARNATION:
        raise WireError(f"incarnation {incarnation!r:.40}; expected 1 to 2^64-1")
    if type(seq) is not int or not 0 <= seq <= MAX_SEQ:
        raise WireError(f"seq {seq!r:.40}; expected an integer of 53 bits")
    if type(ts_us) is not int or not 0 <= ts_us <= MAX_SEQ:
        raise WireError(f"ts_us {ts_us!r:.40}; expected microseconds since 1970")
    if type(scopes) is not dict or type(events) is not list:
        raise WireError("scopes or events have a wrong type; expected a map and an array")
    for entry in scopes.values():
        _check_entry(entry, version)
    for event in events:
        _check_event(event, scopes, version)
    if len(events) > 1:
        codes = [event[CODE] for event in events]
        for code in _AT_MOST_ONE:
            if codes.count(code) > 1:
                raise WireError(f"{codes.count(code)} events with code {code}; expected at most one")
    return raw


def decode(payload: bytes) -> Message:
    """A message, decoded into values. Raises WireError."""
    return from_raw(decode_raw(payload))


def from_raw(raw: RawMessage) -> Message:
    """A checked raw message, as values. Raises WireError for a malformed scope entry."""
    _, worker_id, incarnation, seq, ts_us, scopes, events = raw
    uses = {scope_id: scope_use(scope_id, entry) for scope_id, entry in scopes.items()}
    return Message(worker_id, incarnation, seq, [_decode_event(event) for event in events], uses, ts_us)


def to_raw(message: Message) -> RawMessage:
    """The arrays of a message as they go over the wire, checked. Raises WireError."""
    return decode_raw(encode(message))


def scope_use(scope_id: Any, entry: Any) -> ScopeUse:
    """One entry of the map of scopes. Raises WireError unless it is well formed and its fields hash to the id."""
    _check_entry(entry, VERSION_WITH_TIER_BYTES)
    try:
        scope = Scope(*entry[:BLOCK_SIZE], *entry[CHAIN:TIER_BYTES])
    except InvalidValue as error:
        raise WireError(str(error)) from error
    if scope.scope_id != scope_id:
        raise WireError(f"scope id {scope_id!r:.40} does not match its scope ({scope.log_name})")
    return ScopeUse(scope, *sizes_of(entry))


def sizes_of(entry: list[Any]) -> BlockSizes:
    """The block sizes in a scope entry that has been checked."""
    tier_bytes = in_order(entry[TIER_BYTES].items()) if len(entry) > TIER_BYTES else ()
    return BlockSizes(entry[BLOCK_SIZE], entry[BLOCK_BYTES], tier_bytes)


def _check_entry(entry: Any, version: int) -> None:
    """Check the form of an entry, and its numbers including their types: 16.0 equals 16 but is packed differently."""
    most = CHAIN + max(0, version - VERSION_WITH_MARKS)
    if type(entry) is not list or not CHAIN <= len(entry) <= most:
        raise WireError(f"scope entry is {entry!r:.80}; expected four names, block size, block bytes")
    block_size, block_bytes = entry[BLOCK_SIZE], entry[BLOCK_BYTES]
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_TOKENS:
        raise WireError(f"scope entry has block size {block_size!r:.40}; expected 1 to {MAX_BLOCK_TOKENS} tokens")
    if type(block_bytes) is not int or not 0 <= block_bytes <= MAX_BLOCK_BYTES:
        raise WireError(f"scope entry has block bytes {block_bytes!r:.40}; expected 0 to {MAX_BLOCK_BYTES}")
    if len(entry) > TIER_BYTES:
        tier_bytes = entry[TIER_BYTES]
        if type(tier_bytes) is not dict or len(tier_bytes) >= _TIERS:
            raise WireError(f"scope entry has bytes by tier {tier_bytes!r:.80}; expected a map of fewer than {_TIERS}")
        for tier, size in tier_bytes.items():
            if type(tier) is not int or not 0 < tier < _TIERS:
                raise WireError(f"scope entry has bytes of tier {tier!r:.40}; expected 1 to {_TIERS - 1}")
            if type(size) is not int or not 0 < size <= MAX_BLOCK_BYTES:
                raise WireError(f"scope entry has bytes {size!r:.40} in tier {tier}; expected 1 to {MAX_BLOCK_BYTES}")


def _check_event(event: Any, scopes: dict[Any, Any], version: int) -> None:
    if type(event) is not list or not event:
        raise WireError(f"event is {event!r:.80}; expected an array")
    code = event[CODE]
    if type(code) is not int or not 1 <= code <= LAST_CODE[version]:
        raise WireError(f"event has code {code!r:.80}; expected 1 to {LAST_CODE[version]}")
    if code in _WITH_HASHES:
        if len(event) != (4 if code == REMOVED else 7):
            raise WireError(f"event {code} has {len(event)} fields")
        scope_id, tier, hashes = event[SCOPE_ID], event[TIER], event[HASHES]
        if type(scope_id) is not bytes or len(scope_id) != SCOPE_ID_BYTES or scope_id not in scopes:
            raise WireError(f"event names scope {scope_id!r:.40}, which the message does not describe")
        if type(tier) is not int or not 0 <= tier < _TIERS:
            raise WireError(f"event has tier {tier!r:.40}; expected 0 to {_TIERS - 1}")
        if type(hashes) is not bytes or not hashes or len(hashes) % HASH_BYTES:
            raise WireError("an event's hashes are not packed in 8 bytes each")
        if code != REMOVED:
            parent, first_index, reserved = event[PARENT], event[FIRST_INDEX], event[RESERVED]
            if parent is not None and (type(parent) is not bytes or len(parent) != HASH_BYTES):
                raise WireError(f"event has parent {parent!r:.40}; expected 8 bytes or nil")
            if type(first_index) is not int or not 0 <= first_index <= MAX_SEQ:
                raise WireError(f"event has first index {first_index!r:.40}; expected 0 to {MAX_SEQ}")
            if type(reserved) is not int or reserved:
                raise WireError(f"event's last field is {reserved!r:.40}; it is reserved and must be 0")
    elif code in (END, CHECKPOINT):
        digest = event[-1]
        words = (WORDS,) if version == VERSION else (WORDS, WORDS + MARK_WORDS)
        if len(event) != (3 if code == END else 2) or type(digest) is not list or len(digest) not in words:
            raise WireError(f"event {code} needs a digest of {' or '.join(map(str, words))} integers")
        if any(type(word) is not int or not 0 <= word <= MAX_SEQ for word in digest):
            raise WireError(f"event {code} has digest {digest!r:.80}; expected integers from 0 to 2^53-1")
        if code == END and (type(event[CHUNKS]) is not int or not 0 <= event[CHUNKS] <= MAX_SEQ):
            raise WireError(f"snapshot end counts {event[CHUNKS]!r:.40} chunks; expected 0 to {MAX_SEQ}")
    elif code in _OF_MARKS:
        _check_marks(event, scopes)
    elif code == BEGIN and len(event) == 2 and version != VERSION:
        if type(event[DROPPED]) is not int or not 0 <= event[DROPPED] <= MAX_DROPPED:
            raise WireError(f"snapshot begin drops {event[DROPPED]!r:.80} blocks; expected 0 to {MAX_DROPPED}")
    elif len(event) != 1:
        raise WireError(f"event {code} has {len(event)} fields")


def _check_marks(event: list[Any], scopes: dict[Any, Any]) -> None:
    if len(event) != (4 if event[CODE] == HEADS else 3):
        raise WireError(f"event {event[CODE]} has {len(event)} fields")
    scope_id, hashes = event[SCOPE_ID], event[MARK_HASHES]
    if type(scope_id) is not bytes or len(scope_id) != SCOPE_ID_BYTES or scope_id not in scopes:
        raise WireError(f"event names scope {scope_id!r}, which the message does not describe")
    if type(hashes) is not bytes or not hashes or len(hashes) % HASH_BYTES:
        raise WireError("an event's hashes are not packed in 8 bytes each")
    if event[CODE] == HEADS and (type(event[HEAD_BITS]) is not bytes or len(event[HEAD_BITS]) != len(hashes)):
        raise WireError("bits of heads are not packed in 8 bytes each, one for each hash")


def _needs_marks(event: IndexEvent) -> bool:
    """True if this event can't be expressed in version 1."""
    match event:
        case Marked() | Unmarked() | Heads():
            return True
        case SnapshotBegin():
            return event.dropped is not None
        case SnapshotEnd() | Checkpoint():
            return len(event.digest) != WORDS
    return False


def _encode_event(event: IndexEvent) -> list[Any]:
    match event:
        case Stored():
            return [STORED, event.scope_id, int(event.tier), event.hashes, event.parent, event.first_index, 0]
        case SnapshotChunk():
            return [CHUNK, event.scope_id, int(event.tier), event.hashes, event.parent, event.first_index, 0]
        case Removed():
            return [REMOVED, event.scope_id, int(event.tier), event.hashes]
        case Cleared():
            return [CLEARED]
        case Marked():
            return [MARKED, event.scope_id, event.hashes]
        case Unmarked():
            return [UNMARKED, event.scope_id, event.hashes]
        case Heads():
            return [HEADS, event.scope_id, event.hashes, event.bits]
        case SnapshotBegin():
            return [BEGIN] if event.dropped is None else [BEGIN, event.dropped]
        case SnapshotEnd():
            return [END, event.chunks, list(event.digest)]
        case Checkpoint():
            return [CHECKPOINT, list(event.digest)]


def _decode_event(event: list[Any]) -> IndexEvent:
    code = event[CODE]
    if code in (STORED, CHUNK):
        kind = Stored if code == STORED else SnapshotChunk
        _, scope_id, tier, hashes, parent, first_index, _ = event
        return kind(scope_id, Tier(tier), hashes, parent, first_index)
    if code == REMOVED:
        return Removed(event[SCOPE_ID], Tier(event[TIER]), event[HASHES])
    if code == END:
        return SnapshotEnd(event[CHUNKS], event[END_DIGEST])
    if code == CHECKPOINT:
        return Checkpoint(event[CHECKPOINT_DIGEST])
    if code == HEADS:
        return Heads(event[SCOPE_ID], event[MARK_HASHES], event[HEAD_BITS])
    if code in _OF_MARKS:
        return (Marked if code == MARKED else Unmarked)(event[SCOPE_ID], event[MARK_HASHES])
    return Cleared() if code == CLEARED else SnapshotBegin(*event[DROPPED:])
