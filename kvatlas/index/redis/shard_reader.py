"""Reads a shard's data from the store without using functions."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import Position
from kvatlas.errors import InvalidValue
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import (
    StoredRecord,
    held_field,
    unpack_digest,
    unpack_names,
    unpack_position,
    unpack_touched,
)
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store

SCAN_COUNT = 500
BLOCKS_A_CALL = 500
"""Small, because a value has an entry for each worker that holds the block."""

_log = RateLimitedLog(logging.getLogger("kvatlas.index"))


class ActiveHolder(NamedTuple):
    """A holder that answers: its blocks by tier, and the scopes that it has used, in the form that `unpack_touched` returns."""

    number: bytes
    by_tier: Sequence[int]
    touched: Mapping[bytes, BlockSizes]

    @property
    def blocks(self) -> int:
        return sum(self.by_tier)


class ShardReader:
    """Reads one shard. Every call except `blocks` raises Unreachable. Holders are 3-byte numbers."""

    def __init__(self, store: Store, keys: ShardKeys) -> None:
        self._store = store
        self.keys = keys

    async def record(self, worker_id: str) -> StoredRecord | None:
        packed = await self._store.ask(self._store.client.hget(self.keys.workers, worker_id))
        if packed is None:
            return None
        with suppress(InvalidValue):  # `records` deletes it
            return StoredRecord.unpack(packed)
        return None

    async def records(self, *, repair: bool = False) -> dict[str, StoredRecord]:
        """The records of all workers, by id, except those that can't be read. If `repair` is set, these are deleted: their
        workers are then unknown, and are asked for a snapshot."""
        found = await read_hash(self._store, self.keys.workers)
        records: dict[str, StoredRecord] = {}
        for worker_id, packed in found.items():
            try:
                records[worker_id.decode()] = StoredRecord.unpack(packed)
            except (InvalidValue, UnicodeDecodeError) as error:
                what = "deleting it" if repair else "ignored"
                _log.report("record", f"worker {worker_id.decode(errors='backslashreplace'):.64}: {error}; {what}")
                if repair:
                    await self._store.ask(self._store.client.hdel(self.keys.workers, worker_id))
        return records

    async def active(self) -> dict[bytes, str]:
        """The worker of each active holder."""
        return unpack_names((await read_hash(self._store, self.keys.active)).items())

    async def digests(self, holders: Sequence[bytes]) -> list[list[int]]:
        """The digests (see `unpack_digest`), in the order of `holders`, which must not be empty."""
        digests: list[list[int]] = []
        for first in range(0, len(holders), SCAN_COUNT):
            some = holders[first : first + SCAN_COUNT]
            digests += map(unpack_digest, await self._store.ask(self._store.client.hmget(self.keys.digests, some)))
        return digests

    async def dropped(self) -> dict[bytes, int]:
        """For each holder with marks, the number of blocks by which a position lies before its mark."""
        found = await read_hash(self._store, self.keys.marked)
        return {holder: next(iter(packed), 0) for holder, packed in found.items()}

    async def marks(self, scope_id: bytes, hashes: bytes) -> dict[bytes, bytes]:
        """The values of those blocks among these packed hashes that are marked."""
        keys = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        marks: dict[bytes, bytes] = {}
        for first in range(0, len(keys), BLOCKS_A_CALL):
            some = keys[first : first + BLOCKS_A_CALL]
            found = await self._store.ask(self._store.client.hmget(self.keys.marks(scope_id), some))
            marks.update((key, value) for key, value in zip(some, found, strict=True) if value is not None)
        return marks

    async def touched(self, holder: bytes) -> dict[bytes, BlockSizes]:
        """See `unpack_touched`."""
        return unpack_touched(await self._store.ask(self._store.client.hget(self.keys.touched, holder)))

    async def all_touched(self) -> dict[bytes, dict[bytes, BlockSizes]]:
        """The scopes of every holder; see `unpack_touched`."""
        found = await read_hash(self._store, self.keys.touched)
        return {holder: unpack_touched(packed) for holder, packed in found.items()}

    async def count(self, key: str) -> int:
        """The number of fields in a HASH. Raises Unreachable."""
        return int(await self._store.ask(self._store.client.hlen(key)))

    async def scan(self, key: str) -> AsyncIterator[dict[bytes, bytes]]:
        """Yield some fields per call, until all fields that exist throughout have been returned; a field may come twice. Raises
        Unreachable."""
        cursor = -1
        while cursor:
            cursor, some = await self._store.ask(self._store.client.hscan(key, max(cursor, 0), count=BLOCKS_A_CALL))
            yield some

    async def active_holders(self) -> AsyncIterator[ActiveHolder]:
        active = list(await self.active())
        for holder, digest in zip(active, await self.digests(active), strict=True):
            yield ActiveHolder(holder, digest[0::3], await self.touched(holder))

    async def held(self, holder: ActiveHolder) -> dict[tuple[bytes, Tier], int]:
        """The holder's blocks by scope and tier, not including counts of zero."""
        places = [(scope_id, tier) for scope_id in holder.touched for tier in Tier if holder.by_tier[tier]]
        if len(holder.touched) == 1:
            return {place: holder.by_tier[place[1]] for place in places}
        counted: dict[tuple[bytes, Tier], int] = {}
        for first in range(0, len(places), BLOCKS_A_CALL):
            some = places[first : first + BLOCKS_A_CALL]
            fields = [held_field(holder.number, *place) for place in some]
            found = await self._store.ask(self._store.client.hmget(self.keys.held, fields))
            counted.update((place, int(blocks)) for place, blocks in zip(some, found, strict=True) if blocks)
        return counted

    async def position(self, partition: int) -> Position | None:
        return unpack_position(await self._store.ask(self._store.client.hget(self.keys.partitions, str(partition))))

    async def children(self, scope_id: bytes, parent: bytes) -> list[bytes]:
        """The hashes of the blocks that follow this one (b"": of the roots), from the side index."""
        packed = await self._store.ask(self._store.client.hget(self.keys.children(scope_id), parent)) or b""
        return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

    async def values(self, scope_id: bytes, hashes: Sequence[bytes]) -> list[bytes | None]:
        """Holders values, in the order of `hashes`, which must not be empty."""
        return list(await self._store.ask(self._store.client.hmget(self.keys.blocks(scope_id), hashes)))

    async def has_blocks(self, scope_id: bytes) -> bool:
        return bool(await self._store.ask(self._store.client.exists(self.keys.blocks(scope_id))))

    async def blocks(self, scope_id: bytes) -> AsyncIterator[tuple[bytes, bytes]]:
        """(hash, holders value) for all blocks of a scope, each once. Not atomic. Raises redis' errors."""
        seen: set[bytes] = set()  # a scan may return a field twice
        async for key, value in self._store.client.hscan_iter(self.keys.blocks(scope_id), count=BLOCKS_A_CALL):
            if key not in seen:
                seen.add(key)
                yield key, value

    async def block_batches(self, scope_id: bytes) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """The same blocks as from `blocks`, at most BLOCKS_A_CALL at a time."""
        batch: list[tuple[bytes, bytes]] = []
        async for block in self.blocks(scope_id):
            batch.append(block)
            if len(batch) == BLOCKS_A_CALL:
                yield batch
                batch = []
        if batch:
            yield batch


async def read_hash(store: Store, key: str) -> dict[bytes, bytes]:
    """Read a HASH of any size, some fields per call, so that no call takes long. The result contains every field that exists
    throughout. Raises Unreachable."""
    found: dict[bytes, bytes] = {}
    cursor = -1
    while cursor:
        cursor, some = await store.ask(store.client.hscan(key, max(cursor, 0), count=SCAN_COUNT))
        found.update(some)
    return found
