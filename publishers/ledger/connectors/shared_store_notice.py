"""Notices from an engine's publisher to a shared store's publisher: msgpack `[version, block size, uses keys, changes]`, and
the bytes of a block in the store if the writer knows them.

    [1, scope, hashes, parent or nil]    these blocks of one chain were stored (again); `hashes` packed, parent first
    [2, scope, hashes]                   these blocks are gone
    [3]                                  all blocks are gone: the cache was reset, or the model has new weights
    [4, adapter]                         the adapter's blocks are gone: it was reloaded from another path

`scope` is `[model_id, tokenizer_id, adapter_id, tenant_id]`. `uses keys`: the engine's prompts have adapters, salts or images,
so tokens alone don't identify a connector's block. Notices are lost while the store's publisher is not listening, but no notice
depends on earlier ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.errors import InvalidValue, WireError
from kvatlas.identity import Scope
from kvatlas.msgpack_input import unpack
from kvatlas.validation import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS

VERSION = 1
MAX_NOTICE_BYTES = 512 * 1024
MAX_CHANGE_BLOCKS = 4_096
_MOST_CHANGES = 128
"""With this many changes and _MOST_BLOCKS blocks, a notice is smaller than MAX_NOTICE_BYTES, whatever the names in its
scopes."""
_MOST_BLOCKS = 16_384


class _Kind(IntEnum):
    """The first field of a change."""

    STORED = 1
    GONE = 2
    CLEARED = 3
    ADAPTER_GONE = 4


@dataclass(frozen=True, slots=True)
class StoredInStore:
    """`hashes` are packed; `parent` is the packed hash before the first one, None at a root."""

    scope: Scope
    hashes: bytes
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class GoneFromStore:
    scope: Scope
    hashes: bytes


@dataclass(frozen=True, slots=True)
class StoreCleared:
    """All blocks are gone."""


@dataclass(frozen=True, slots=True)
class AdapterGone:
    adapter: str


StoreChange = StoredInStore | GoneFromStore | StoreCleared | AdapterGone


@dataclass(frozen=True, slots=True)
class StoreNotice:
    """See the module docstring. `block_size`: tokens of the writer's blocks; `block_bytes`: bytes of each in the store, 0 if
    unknown."""

    block_size: int
    uses_keys: bool
    changes: Sequence[StoreChange] = ()
    block_bytes: int = 0


def encode(
    block_size: int, uses_keys: bool, changes: Sequence[StoreChange], *, block_bytes: int = 0
) -> Iterator[bytes]:
    """The notices for these changes, in order; one empty notice if there are none."""
    more = [block_bytes] if block_bytes else []
    part: list[Any] = []
    size = 0
    for change in changes:
        for blocks, item in _encode(change):
            if part and (size + blocks > _MOST_BLOCKS or len(part) == _MOST_CHANGES):
                yield _pack(block_size, uses_keys, part, *more)
                part, size = [], 0
            part.append(item)
            size += blocks
    if part or not changes:
        yield _pack(block_size, uses_keys, part, *more)


def _pack(*fields: Any) -> bytes:
    return bytes(msgpack.packb([VERSION, *fields]))


def _encode(change: StoreChange) -> Iterator[tuple[int, list[Any]]]:
    """(number of blocks, fields) for each part of a change."""
    match change:
        case StoredInStore(scope, hashes, parent):
            for part in _cut(hashes):
                yield len(part) // HASH_BYTES, [_Kind.STORED, _names(scope), part, parent]
                parent = part[-HASH_BYTES:]
        case GoneFromStore(scope, hashes):
            for part in _cut(hashes):
                yield len(part) // HASH_BYTES, [_Kind.GONE, _names(scope), part]
        case StoreCleared():
            yield 0, [_Kind.CLEARED]
        case AdapterGone(adapter):
            yield 0, [_Kind.ADAPTER_GONE, adapter]


def _cut(hashes: bytes) -> Iterator[bytes]:
    step = MAX_CHANGE_BLOCKS * HASH_BYTES
    return (hashes[at : at + step] for at in range(0, len(hashes), step))


def _names(scope: Scope) -> list[str | None]:
    return [scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id]


def decode(payload: bytes) -> StoreNotice:
    """Decode a notice. Raises WireError, which says what is wrong, for any other bytes."""
    try:
        raw = unpack(payload, max_bytes=MAX_NOTICE_BYTES)
    except InvalidValue as error:
        raise WireError(f"notice of {error}") from error
    match raw:
        case [version, block_size, uses_keys, changes, *more] if version == VERSION and len(more) <= 1:
            (block_bytes,) = more or (0,)
        case _:
            raise WireError(f"notice {raw!r:.60}; expected an array of 4 or 5 fields and version {VERSION}")
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_TOKENS:
        raise WireError(f"notice with block size {block_size!r:.40}; expected 1 to {MAX_BLOCK_TOKENS} tokens")
    if type(uses_keys) is not bool or not isinstance(changes, list):
        raise WireError(f"notice with keys {uses_keys!r:.40} and changes {changes!r:.40}; expected a flag and an array")
    if type(block_bytes) is not int or not 0 <= block_bytes <= MAX_BLOCK_BYTES:
        raise WireError(f"notice with block bytes {block_bytes!r:.40}; expected up to {MAX_BLOCK_BYTES}")
    return StoreNotice(block_size, uses_keys, [_decode(change) for change in changes], block_bytes)


def _decode(raw: Any) -> StoreChange:
    match raw:
        case [_Kind.STORED, names, bytes(hashes), parent] if _are_packed(hashes) and _is_parent(parent):
            return StoredInStore(_scope(names), hashes, parent)
        case [_Kind.GONE, names, bytes(hashes)] if _are_packed(hashes):
            return GoneFromStore(_scope(names), hashes)
        case [_Kind.CLEARED]:
            return StoreCleared()
        case [_Kind.ADAPTER_GONE, str(adapter)]:
            return AdapterGone(adapter)
    raise WireError(f"change {raw!r:.80}; expected one of kinds {min(_Kind)} to {max(_Kind)}, with its fields")


def _are_packed(hashes: bytes) -> bool:
    return 0 < len(hashes) <= MAX_CHANGE_BLOCKS * HASH_BYTES and not len(hashes) % HASH_BYTES


def _is_parent(parent: Any) -> bool:
    return parent is None or (isinstance(parent, bytes) and len(parent) == HASH_BYTES)


def _scope(names: Any) -> Scope:
    if not isinstance(names, list) or len(names) != 4:
        raise WireError(f"scope {names!r:.80}; expected four names")
    try:
        return Scope(*names)
    except (InvalidValue, TypeError) as error:
        raise WireError(f"scope {names!r:.80}: {error}") from error
