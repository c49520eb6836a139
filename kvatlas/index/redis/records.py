"""A shard's stored values, unpacked. `functions/_slot.lua` documents each key; the fields are in the same order here."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from struct import calcsize, iter_unpack, pack
from typing import Any, Literal, NamedTuple, Self

import msgpack

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.digest import WORDS
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import Position
from kvatlas.errors import InvalidValue
from kvatlas.identity import check_worker_id
from kvatlas.index.protocol import WorkerRecord
from kvatlas.runtime.rate_limited_log import RateLimitedLog

HOLDER_BYTES = 3
_log = RateLimitedLog(logging.getLogger("kvatlas.index"))

_TOUCHED = ">8sII"
_SIZES = ">II"
_SIZE_LIMIT = 1 << 24
"""Larger than any block size, because the byte in front of it holds a tier."""
TOUCHED_BYTES = calcsize(_TOUCHED)
_REACH = ">3sI"


class OverlapAnswer(NamedTuple):
    """See `functions/overlap.lua`."""

    version: bytes
    values: list[bytes]
    lengths: list[int]
    reach: bytes
    left: bytes
    next: int


class StoredRecord(NamedTuple):
    """A worker's record. Incarnations are 8 big-endian bytes, holders are 3; if `active` or `loading` is empty, there is no
    such holder."""

    incarnation: bytes
    seq: int
    active: bytes
    loading: bytes
    bad: int
    closed: int
    oom: int
    want_incarnation: bytes
    want_seq: int
    chunks: int
    partition: int

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Unpack a record. Raises InvalidValue for bytes that are not a record."""
        try:
            record = cls(*msgpack.unpackb(packed, raw=True))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidValue(f"not a worker's record: {packed[:40]!r}") from error
        if [(type(value), len(value) if type(value) is bytes else 0) for value in record] not in _FORMS:
            raise InvalidValue(f"not a worker's record: {packed[:40]!r}")
        return record

    def of_worker(self, worker_id: str) -> WorkerRecord:
        return WorkerRecord(
            worker_id,
            unpack_incarnation(self.incarnation),
            self.seq,
            self.partition,
            bool(self.bad),
            bool(self.closed),
            bool(self.oom),
            (unpack_incarnation(self.want_incarnation), self.want_seq),
            answering=self.active != b"",
            loading=self.loading != b"",
        )


_FORMS = [
    [(bytes, 8), (int, 0), active, loading, (int, 0), (int, 0), (int, 0), (bytes, 8), (int, 0), (int, 0), (int, 0)]
    for active in ((bytes, 0), (bytes, 3))
    for loading in ((bytes, 0), (bytes, 3))
]
"""The types and lengths of a record's fields."""


class HolderState(NamedTuple):
    """The active holder of a worker as of (incarnation, seq), plus `steps` of the next message. `digest`: `Digest.words`.
    `registered`: the holder's own entries name this worker. `marks`: `MarkDigest.words`; False for a holder without marks."""

    incarnation: bytes
    seq: int
    holder: bytes
    digest: Sequence[int]
    registered: int
    steps: int
    marks: Sequence[int] | Literal[False]

    @property
    def moment(self) -> tuple[int, int]:
        """A value that changes whenever the holder's blocks or marks change within an incarnation."""
        return self.seq, self.steps

    @classmethod
    def of(cls, fields: Sequence[Any] | None) -> Self | None:
        """The state that a function has returned; None for a worker without an active holder."""
        return cls(*fields) if fields else None

    @classmethod
    def unpack(cls, answer: bytes) -> Self | None:
        """The state in an answer from `functions/look.lua`."""
        _, fields, _ = msgpack.unpackb(answer, raw=True)
        return cls.of(fields)


def pack_incarnation(incarnation: int) -> bytes:
    return incarnation.to_bytes(8, "big")


def unpack_incarnation(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


def unpack_touched(packed: bytes | None) -> dict[bytes, BlockSizes]:
    """The scopes that a holder has used, and the sizes of its blocks there."""
    found: dict[bytes, BlockSizes] = {}
    for scope_id, tier_and_size, block_bytes in iter_unpack(_TOUCHED, packed or b""):
        tier, size = divmod(tier_and_size, _SIZE_LIMIT)
        if tier == Tier.HBM:
            found[scope_id] = found.get(scope_id, BlockSizes())._replace(block_size=size, block_bytes=block_bytes)
        elif tier < len(Tier):
            new = BlockSizes(tier_bytes=((Tier(tier), block_bytes),))
            found[scope_id] = found.get(scope_id, BlockSizes()).updated(new)
    return found


def pack_sizes(sizes: BlockSizes) -> bytes:
    """The bytes that follow the scope id in each of a scope's entries in `touched`; the entry for the device tier comes
    first."""
    by_tier = [(Tier.HBM, sizes.block_bytes), *sizes.tier_bytes]
    return b"".join(pack(_SIZES, tier * _SIZE_LIMIT + sizes.block_size, block_bytes) for tier, block_bytes in by_tier)


def held_field(holder: bytes, scope_id: bytes, tier: Tier) -> bytes:
    """The field that counts how many blocks of a scope a holder has in a tier."""
    return holder + scope_id + bytes((tier,))


def unpack_digest(packed: bytes | None) -> list[int]:
    """`Digest.words` of a holder. Zeros if nothing is stored. If the bytes are not a digest, words that no holder can have, as
    in `functions/_slot.lua`."""
    if packed is None:
        return [0] * WORDS
    try:
        words = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException):
        words = None
    good = isinstance(words, list) and len(words) == WORDS and all(type(word) is int for word in words)
    return words if good else [1] + [0] * (WORDS - 1)


def unpack_reach(packed: bytes) -> dict[int, int]:
    """The positions of marked holders, by holder number (see `functions/overlap.lua`)."""
    return {int.from_bytes(number, "big"): position for number, position in iter_unpack(_REACH, packed)}


def pack_reach(positions: Mapping[int, int]) -> bytes:
    """The inverse of `unpack_reach`."""
    return b"".join(pack(_REACH, number.to_bytes(3, "big"), position) for number, position in positions.items())


def pack_position(position: Position | None) -> str:
    """The stored text of a position; empty for None."""
    return f"{position.creation_us} {position.seq}" if position is not None else ""


def unpack_position(stored: bytes | None) -> Position | None:
    """Parse a stored position. Returns None for anything else; reading then starts as it does in an empty store."""
    numbers = (stored or b"").split()
    return Position(*map(int, numbers)) if len(numbers) == 2 and all(one.isdigit() for one in numbers) else None


def unpack_names(flat: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """The worker of each active holder. Invalid entries are dropped: the scrub finds that the holder of such a worker is not
    registered, and a snapshot then gives the worker a new one."""
    names: dict[bytes, str] = {}
    for holder, name in flat:
        try:
            if len(holder) == HOLDER_BYTES:
                names[holder] = check_worker_id(name.decode())
                continue
        except ValueError:  # InvalidValue and UnicodeDecodeError are both ValueErrors
            pass
        _log.report(
            "active", f"holder {holder.hex():.32} names worker {name[:64]!r}, which is not a worker id; ignored"
        )
    return names


def pairs(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """(field, value) pairs of a flat answer."""
    return zip(flat[::2], flat[1::2], strict=True)
