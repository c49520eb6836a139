"""Changes an index's blocks behind its back."""

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope, shard_of
from kvatlas.index.holder_entries import find_entry, number_bytes
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import StoredRecord


class Damage:
    """The blocks of one worker."""

    def __init__(self, index: ResidencyIndex, worker_id: str) -> None:
        assert isinstance(index, (MemoryIndex, RedisIndex))
        self.index = index
        self.worker_id = worker_id
        self.shard = shard_of(partition_of(worker_id, index.partitions), index.shards)
        self.keys = ShardKeys(self.shard)

    async def number(self) -> bytes:
        """The worker's active holder."""
        if isinstance(self.index, MemoryIndex):
            return number_bytes(self.index._shards[self.shard].workers[self.worker_id].active)
        packed = await self.index._store.client.hget(self.keys.workers, self.worker_id)
        return StoredRecord.unpack(packed).active

    async def value(self, scope: Scope, key: bytes) -> bytes:
        if isinstance(self.index, MemoryIndex):
            return self.index._shards[self.shard].table.blocks.get(scope.scope_id, {}).get(key, b"")
        return await self.index._store.client.hget(self.keys.blocks(scope.scope_id), key) or b""

    async def write(self, scope: Scope, key: bytes, value: bytes) -> None:
        if isinstance(self.index, MemoryIndex):
            blocks = self.index._shards[self.shard].table.blocks.setdefault(scope.scope_id, {})
            blocks[key] = value
            if not value:
                del blocks[key]
        elif value:
            await self.index._store.client.hset(self.keys.blocks(scope.scope_id), key, value)
        else:
            await self.index._store.client.hdel(self.keys.blocks(scope.scope_id), key)

    async def add(self, scope: Scope, key: bytes, flags: int = Tier.HBM.flag, number: bytes | None = None) -> None:
        """Add an entry of the worker's holder, or of another number."""
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
