"""Changes an index's blocks without its knowledge."""

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope, shard_of
from kvatlas.index.holder_entries import find_entry
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import StoredRecord


async def damaged(index: ResidencyIndex, *worker_ids: str) -> list[str]:
    """The workers whose blocks (in a store: or marks, or entries) differ from their digests."""
    totals = {worker_id: Digest() for worker_id in worker_ids}
    unsound: set[str] = set()
    if isinstance(index, RedisIndex):
        for one in await index.recount(worker_ids):
            words = [sum(column) % (1 << 32) for column in zip(Digest().words, *one.scopes.values(), strict=True)]
            totals[one.worker_id] = Digest(words)
            unsound |= set() if one.sound else {one.worker_id}
    else:
        async for held in index.snapshot():
            if held.worker_id in totals:
                key = held.sequence_hash.to_bytes(HASH_BYTES, "little")
                totals[held.worker_id].add(held.scope.scope_id, held.tier, key)
    digests = {worker_id: list(await index.digest(worker_id) or Digest().words)[:WORDS] for worker_id in worker_ids}
    return [one for one in worker_ids if one in unsound or totals[one].words != digests[one]]


class Damage:
    """The blocks of one worker."""

    def __init__(self, index: ResidencyIndex, worker_id: str) -> None:
        assert isinstance(index, RedisIndex)
        self.client = index._store.client
        self.worker_id = worker_id
        self.shard = shard_of(partition_of(worker_id, index.partitions), index.shards)
        self.keys = ShardKeys(self.shard)

    async def number(self) -> bytes:
        """The worker's active holder."""
        return StoredRecord.unpack(await self.client.hget(self.keys.workers, self.worker_id)).active

    async def value(self, scope: Scope, key: bytes) -> bytes:
        return await self.client.hget(self.keys.blocks(scope.scope_id), key) or b""

    async def write(self, scope: Scope, key: bytes, value: bytes) -> None:
        blocks = self.keys.blocks(scope.scope_id)
        await (self.client.hset(blocks, key, value) if value else self.client.hdel(blocks, key))

    async def add(self, scope: Scope, key: bytes, flags: int = Tier.HBM.flag, number: bytes | None = None) -> None:
        """An entry of the worker's holder, or of another number."""
        number = await self.number() if number is None else number
        value = await self.value(scope, key)
        at, found = find_entry(value, number)
        assert not found
        await self.write(scope, key, value[:at] + number + bytes([flags]) + value[at:])

    async def take(self, scope: Scope, key: bytes) -> None:
        value = await self.value(scope, key)
        at, found = find_entry(value, await self.number())
        assert found
        await self.write(scope, key, value[:at] + value[at + 4 :])

    async def change_flags(self, scope: Scope, key: bytes, flags: int) -> None:
        value = await self.value(scope, key)
        at, found = find_entry(value, await self.number())
        assert found
        await self.write(scope, key, value[: at + 3] + bytes([flags]) + value[at + 4 :])
