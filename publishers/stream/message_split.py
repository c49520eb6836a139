"""Splits the events of one flush into messages that fit the bus, keeping their order.

The index applies a message as a whole, so the residency must be correct after each part. The ledger's order (added tiers,
lost tiers, removals child-first, stores parent-first) guarantees this for any split; the same holds for the marks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvatlas.blocks.digest import MARK_WORDS, WORDS
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Heads, IndexEvent, Marked, Removed, ScopeUse, SnapshotChunk, Stored, Unmarked
from kvatlas.identity import MAX_NAME_BYTES

# Upper bounds of encoded sizes in bytes (see kvatlas.bus.wire for the arrays).
_ENVELOPE_BYTES = 1 + 1 + (2 + 64) + 9 + 9 + 9 + 5 + 5
_STORED_BYTES = 1 + 1 + 10 + 1 + 5 + 10 + 9 + 1
_REMOVED_BYTES = 1 + 1 + 10 + 1 + 5
_MARKED_BYTES = 1 + 1 + 10 + 5 + 5
_OTHER_BYTES = 1 + 1 + 9 + 3 + (WORDS + MARK_WORDS) * 9
_TIER_BYTES = 1 + 5
_LARGEST_SCOPE_BYTES = 10 + 1 + 5 * (3 + MAX_NAME_BYTES) + 9 + 9 + 1 + (len(Tier) - 1) * _TIER_BYTES  # with a chain

SMALLEST_MESSAGE_BYTES = 4096
"""A limit that every event fits, even with the longest names, if it is split between its hashes."""

_OF_BLOCKS = (Stored, SnapshotChunk, Removed)
_OF_MARKS = (Marked, Unmarked, Heads)
_SCOPED = (*_OF_BLOCKS, *_OF_MARKS)

_Event = TypeVar("_Event", bound=IndexEvent)

Part = tuple[list[IndexEvent], dict[bytes, ScopeUse]]
"""One message's events, and the scopes they use."""


def event_bytes(event: IndexEvent) -> int:
    """Upper bound on the bytes that an event takes on the wire."""
    if isinstance(event, (Stored, SnapshotChunk)):
        return _STORED_BYTES + len(event.hashes)
    if isinstance(event, Removed):
        return _REMOVED_BYTES + len(event.hashes)
    if isinstance(event, (Marked, Unmarked)):
        return _MARKED_BYTES + len(event.hashes)
    if isinstance(event, Heads):
        return _MARKED_BYTES + len(event.hashes) + len(event.bits)
    return _OTHER_BYTES


def scope_bytes(use: ScopeUse) -> int:
    """Upper bound on the bytes that a scope's entry in the scopes map takes on the wire."""
    scope = use.scope
    names = (scope.model_id, scope.tokenizer_id, scope.adapter_id or "", scope.tenant_id, scope.chain)
    return 10 + 1 + sum(3 + len(name.encode()) for name in names) + 9 + 9 + 1 + _TIER_BYTES * len(use.tier_bytes)


def split_into_messages(
    events: Sequence[IndexEvent], uses: Mapping[bytes, ScopeUse], limit_bytes: int, granularity: int = 1
) -> list[Part]:
    """Split the events, in order, into parts that encode to at most `limit_bytes`, each with only the scopes that it uses.

    An event that is too large on its own is split between its hashes; `granularity` is their distance in the chain. `uses`
    describes every scope of the events.
    """
    scope_ids = {event.scope_id for event in events if isinstance(event, _SCOPED)}
    if sum(map(event_bytes, events)) + len(scope_ids) * _LARGEST_SCOPE_BYTES + _ENVELOPE_BYTES <= limit_bytes:
        return [(list(events), {scope_id: uses[scope_id] for scope_id in scope_ids})] if events else []
    return _split(events, uses, limit_bytes, granularity)


def _split(
    events: Sequence[IndexEvent], uses: Mapping[bytes, ScopeUse], limit_bytes: int, granularity: int
) -> list[Part]:
    parts: list[Part] = []
    part: list[IndexEvent] = []
    scopes: dict[bytes, ScopeUse] = {}
    room = limit_bytes - _ENVELOPE_BYTES
    for event in events:
        scope_id = event.scope_id if isinstance(event, _SCOPED) else None
        use = uses[scope_id] if scope_id is not None else None
        largest = limit_bytes - _ENVELOPE_BYTES - (scope_bytes(use) if use is not None else 0)
        for piece in (event,) if event_bytes(event) <= largest else _pieces(event, largest, granularity):
            size = event_bytes(piece)
            if use is not None and scope_id not in scopes:
                size += scope_bytes(use)
            if size > room and part:
                parts.append((part, scopes))
                part, scopes, room = [], {}, limit_bytes - _ENVELOPE_BYTES
                size = event_bytes(piece) + (scope_bytes(use) if use is not None else 0)
            part.append(piece)
            if use is not None and scope_id is not None:
                scopes[scope_id] = use
            room -= size
    if part:
        parts.append((part, scopes))
    return parts


def _pieces(event: IndexEvent, largest_bytes: int, granularity: int) -> Iterator[IndexEvent]:
    if isinstance(event, _OF_MARKS):
        return _split_marks(event, largest_bytes)
    return _split_event(event, largest_bytes, granularity)


def split_chunks(
    chunks: Sequence[SnapshotChunk], uses: Mapping[bytes, ScopeUse], limit_bytes: int, granularity: int = 1
) -> Sequence[SnapshotChunk]:
    """Split the chunks so that each fits a message of `limit_bytes`. A snapshot's end counts the resulting chunks."""
    pieces: list[SnapshotChunk] = []
    for chunk in chunks:
        largest = limit_bytes - _ENVELOPE_BYTES - scope_bytes(uses[chunk.scope_id])
        if event_bytes(chunk) <= largest:
            pieces.append(chunk)
        else:
            pieces += _split_event(chunk, largest, granularity)
    return pieces


def _split_event(event: _Event, largest_bytes: int, granularity: int) -> Iterator[_Event]:
    if not isinstance(event, _OF_BLOCKS):
        raise ValueError(f"event {type(event).__name__} of {event_bytes(event)} bytes can't be split")
    fixed = event_bytes(event) - len(event.hashes)
    step = (largest_bytes - fixed) // HASH_BYTES * HASH_BYTES
    for at in range(0, len(event.hashes), step):
        hashes = event.hashes[at : at + step]
        if isinstance(event, Removed):
            yield replace(event, hashes=hashes)
        else:
            parent = event.hashes[at - HASH_BYTES : at] if at else event.parent
            first_index = event.first_index + at // HASH_BYTES * granularity
            yield replace(event, hashes=hashes, parent=parent, first_index=first_index)


def _split_marks(event: Marked | Unmarked | Heads, largest_bytes: int) -> Iterator[IndexEvent]:
    step = (largest_bytes - _MARKED_BYTES) // (2 * HASH_BYTES) * HASH_BYTES  # a head has as many bytes of bits
    for at in range(0, len(event.hashes), step):
        if isinstance(event, Heads):
            yield replace(event, hashes=event.hashes[at : at + step], bits=event.bits[at : at + step])
        else:
            yield replace(event, hashes=event.hashes[at : at + step])


def block_count(events: Sequence[IndexEvent]) -> int:
    """The number of blocks that the events add or remove."""
    return sum(len(e.hashes) for e in events if isinstance(e, _OF_BLOCKS)) // HASH_BYTES
