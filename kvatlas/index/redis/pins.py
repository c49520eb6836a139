"""The blocks that were pinned when they were put. Direct writes record them, separately from the messages.
`functions/_slot.lua` documents the keys."""

from collections.abc import Sequence
from dataclasses import replace

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import Residency
from kvatlas.blocks.tiers import Tier
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store

BLOCKS_A_CALL = 500


class Pins:
    """The pins of one shard. Pins of blocks that the holder does not have in that tier mean nothing. Raises Unreachable."""

    def __init__(self, store: Store, keys: ShardKeys) -> None:
        self._store = store
        self._keys = keys

    async def put(self, holder: bytes, scope_id: bytes, tier: Tier, hashes: bytes, *, pinned: bool) -> None:
        """Pin or unpin these blocks in the tier."""
        client, key = self._store.client, self._keys.pinned_by(holder)
        if pinned:
            await self._store.ask(client.sadd(self._keys.pinned, holder))
        elif not await self._store.ask(client.exists(key)):
            return
        change = client.sadd if pinned else client.srem
        for first in range(0, len(hashes), BLOCKS_A_CALL * HASH_BYTES):
            part = hashes[first : first + BLOCKS_A_CALL * HASH_BYTES]
            some = [part[at : at + HASH_BYTES] for at in range(0, len(part), HASH_BYTES)]
            await self._store.ask(change(key, *(_member(scope_id, tier, one) for one in some)))

    async def holders(self) -> set[bytes]:
        return set(await self._store.ask(self._store.client.smembers(self._keys.pinned)))

    async def mark(self, found: Sequence[tuple[bytes, Residency]], holders: set[bytes]) -> list[Residency]:
        """These residencies, in the same order, each with its `pinned` filled in. `holders`: those that have any pins."""
        marked = [residency for _, residency in found]
        places: dict[bytes, list[int]] = {}
        for at, (holder, _) in enumerate(found):
            if holder in holders:
                places.setdefault(holder, []).append(at)
        for holder, its in places.items():
            for first in range(0, len(its), BLOCKS_A_CALL):
                some = its[first : first + BLOCKS_A_CALL]
                members = [_member_of(marked[at]) for at in some]
                answers = await self._store.ask(self._store.client.smismember(self._keys.pinned_by(holder), members))
                for at, answer in zip(some, answers, strict=True):
                    marked[at] = replace(marked[at], pinned=bool(answer))
        return marked


def _member(scope_id: bytes, tier: Tier, packed_hash: bytes) -> bytes:
    return scope_id + bytes((tier,)) + packed_hash


def _member_of(residency: Residency) -> bytes:
    packed_hash = residency.sequence_hash.to_bytes(HASH_BYTES, "little")
    return _member(residency.scope.scope_id, residency.tier, packed_hash)
