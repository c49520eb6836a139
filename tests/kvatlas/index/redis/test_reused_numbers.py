"""Sweeps of several owners, a few blocks at a time, while owners crash and the store fails over to older data: a number is
never free while blocks have it, and no worker ever appears with another worker's blocks."""

import random
from collections.abc import AsyncIterator
from copy import copy

import pytest

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.bus.wire import RawMessage
from kvatlas.embedded import valkey_server
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import entries_of
from kvatlas.index.redis.index import REUSE_MS, RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.failover import dump_all, restore
from tests.kvatlas.index.message_source import Held, MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

SCOPES = [Scope("m", "t"), Scope("m", "t", "lora")]
HASHES = range(1, 61)
K = ShardKeys(0)
STEPS = 120
UNDISTURBED_SWEEPS = 150
"""Enough to finish every sweep, whatever the steps left behind."""


@pytest.fixture
async def stores() -> AsyncIterator[list[Store]]:
    """A primary and its replicas, empty; hashes are scanned in several parts."""
    async with valkey_server() as second, valkey_server() as third, valkey_server() as fourth:
        opened = [await open_store(one.url, wait=False) for one in (second, third, fourth)]
        try:
            for store in opened:
                await store.client.config_set("hash-max-listpack-entries", 4)
            yield opened
        finally:
            for store in opened:
                await store.close()


class World:
    def __init__(self, stores: list[Store], rng: random.Random) -> None:
        self.stores = stores
        self.address = copy(stores[0])
        """A connection to the primary, which is the first of `stores`."""
        self.rng = rng
        self.owners: list[RedisIndex] = []
        self.sources = [MessageSource(f"w{i}", incarnation=0) for i in range(3)]
        self.published: dict[tuple[str, int, int], Held] = {}
        self.dumps: list[dict[bytes, bytes]] = []
        self.freed = 0

    async def open(self) -> RedisIndex:
        return await open_redis_index(self.address, shards=1, writer=True, reuse_ms=0)

    async def start(self) -> None:
        for _ in self.stores:
            await self.open()
            self.next_server()
        self.owners = [await self.open() for _ in range(2)]
        for scope in SCOPES:  # so every dump has their texts, which come again only with a worker's next message
            source = self.sources[0]
            await self.send(source, source.begin(source.incarnation + 1))
            await self.send(source, source.store(scope, pack_hashes(HASHES)))
        await self.keep()

    async def send(self, source: MessageSource, message: RawMessage) -> None:
        self.published[source.worker_id, source.incarnation, source.seq] = {
            where: set(tiers) for where, tiers in source.held.items()
        }
        await apply_messages(self.rng.choice(self.owners), message)

    def next_server(self) -> None:
        self.stores.append(self.stores.pop(0))
        vars(self.address).update(vars(self.stores[0]))

    async def publish(self) -> None:
        rng = self.rng
        source = rng.choice(self.sources)
        what = rng.random()
        if source.seq < 0 or what < 0.3:
            message = source.begin(source.incarnation + 1)
        elif what < 0.4:
            message = source.clear()
        elif what < 0.6 and source.held:
            scope, key = rng.choice(sorted(source.held, key=repr))
            message = source.remove(scope, key)
        else:
            message = source.store(rng.choice(SCOPES), pack_hashes(rng.sample(HASHES, rng.randint(1, 30))))
        await self.send(source, message)

    async def retire(self) -> None:
        owner, source = self.rng.choice(self.owners), self.rng.choice(self.sources)
        if (record := await owner.record(source.worker_id)) is not None:
            await owner.retire(source.worker_id, record.incarnation)

    async def sweep(self) -> None:
        await self.rng.choice(self.owners).sweep(0, 1)

    async def crash(self) -> None:
        self.owners[self.rng.randrange(len(self.owners))] = await self.open()

    async def keep(self) -> None:
        self.dumps = [*self.dumps[-3:], await dump_all(self.stores[0])]

    async def fail_over(self) -> None:
        """Fail over to another server, whose data has a different history even if it was the primary before; the owners
        continue their sweeps."""
        if self.dumps:
            self.next_server()
            for master in ("127.0.0.1 1", "NO ONE"):  # a promotion changes the id of the replication
                await self.stores[0].client.execute_command("REPLICAOF", *master.split())
            await restore(self.stores[0], self.rng.choice(self.dumps))

    async def check(self) -> None:
        owner, client = self.owners[0], self.stores[0].client
        source = self.rng.choice(self.sources)
        record = await owner.record(source.worker_id)
        if record is not None and record.answering:
            published = self.published[source.worker_id, record.incarnation, record.seq]
            assert await contents(owner, source.worker_id) == published
        free = {entry[:3] for entry in await client.lrange(K.free, 0, -1)}
        self.freed += len(free)
        for scope in SCOPES:
            for value in (await client.hgetall(K.blocks(scope.scope_id))).values():
                assert not {number for number, _ in entries_of(value)} & free


async def test_a_number_is_free_only_if_no_block_has_it(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    monkeypatch.setattr("kvatlas.index.redis.sweep.CALL_COST", 8)
    world = World(stores, random.Random(seed))
    await world.start()
    moves = [world.publish, world.sweep, world.retire, world.crash, world.keep, world.fail_over]
    for _ in range(STEPS):
        [move] = world.rng.choices(moves, [40, 45, 4, 3, 5, 3])
        await move()
        await world.check()
    for _ in range(UNDISTURBED_SWEEPS):
        await world.sweep()
        await world.check()
    assert world.freed
    assert not await world.stores[0].client.exists(K.retired)


async def test_a_scan_proves_nothing_about_a_number_that_was_given_out_again(stores: list[Store]) -> None:
    """However soon that was: the store's clock may have jumped."""
    first, second = [
        await open_redis_index(stores[0], partitions=1, shards=1, writer=True, reuse_ms=0) for _ in range(2)
    ]
    a, b = MessageSource("a"), MessageSource("b")
    hashes = pack_hashes(HASHES)
    await apply_messages(first, a.begin(1), a.store(SCOPES[0], hashes))
    await first.retire("a", 1)
    await first.sweep(0, 1)
    await second.sweep(0, 1)  # finds nothing
    assert await first.sweep(0, 1) == 0  # the number is free
    await apply_messages(first, b.begin(1), b.store(SCOPES[0], hashes))
    fresh = await open_redis_index(stores[0], writer=True)
    assert await contents(fresh, "b") == b.held
    await first.retire("b", 1)
    assert await second.sweep(0, 1) == 1  # b's blocks are still there
    assert await stores[0].client.llen(K.free) == 0
    while await second.sweep(0, 1):
        pass
    assert not await stores[0].client.exists(K.blocks(SCOPES[0].scope_id))


async def test_a_sweep_on_one_server_frees_no_number_on_another(stores: list[Store]) -> None:
    """The count of the retired holder is wrong, so only a whole sweep proves that no block has its number; after a failover,
    it proves nothing."""
    address = copy(stores[0])
    index = await open_redis_index(address, partitions=1, shards=1, writer=True, reuse_ms=0)
    await apply_messages(index, MessageSource("a").begin(1))
    source = MessageSource("b")
    await apply_messages(index, source.begin(1), source.store(SCOPES[0], pack_hashes(HASHES)))
    await index.retire("b", 1)
    behind = await dump_all(stores[0])
    blocks = K.blocks(SCOPES[0].scope_id)
    await stores[0].client.delete(blocks)  # damage: its count is not zero
    assert await index.sweep(0, 1) == 1  # the whole sweep, without the release
    await restore(stores[1], behind)
    vars(address).update(vars(stores[1]))
    await index.sweep(0, 1)
    assert await stores[1].client.llen(K.free) == 0 and await stores[1].client.exists(blocks)
    while await index.sweep(0, 1):
        pass
    assert await stores[1].client.llen(K.free) == 1 and not await stores[1].client.exists(blocks)


async def test_a_sweep_begins_again_on_another_server(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.index.redis.sweep.CALL_COST", 8)
    address = copy(stores[0])
    index = await open_redis_index(address, partitions=1, shards=1, writer=True, reuse_ms=0)
    source = MessageSource("b")
    stored = [source.store(scope, pack_hashes(HASHES)) for scope in SCOPES]
    await apply_messages(index, source.begin(1), *stored)
    await index.retire("b", 1)
    behind = await dump_all(stores[0])
    swept = sorted(scope.scope_id for scope in SCOPES)[-1]
    while await stores[0].client.exists(K.blocks(swept)):
        await index.sweep(0, 1)
    await restore(stores[1], behind)
    vars(address).update(vars(stores[1]))
    while not await stores[1].client.llen(K.free):
        await index.sweep(0, 1)
    assert not await stores[1].client.exists(*(K.blocks(scope.scope_id) for scope in SCOPES))


async def test_a_wrong_count_does_not_keep_a_number_for_ever(stores: list[Store]) -> None:
    index = await open_redis_index(stores[0], partitions=1, shards=1, writer=True, reuse_ms=0)
    source = MessageSource("b")
    await apply_messages(index, source.begin(1), source.store(SCOPES[0], pack_hashes(HASHES)))
    await index.retire("b", 1)
    await stores[0].client.hdel(K.blocks(SCOPES[0].scope_id), pack_hashes([7]))
    for _ in range(UNDISTURBED_SWEEPS):
        if not await index.sweep(0, 1):
            break
    assert await stores[0].client.llen(K.free) == 1


async def test_a_number_is_used_again_only_after_a_while(stores: list[Store]) -> None:
    """Clients may still know its old name."""
    index = await open_redis_index(stores[0], partitions=1, shards=1, writer=True)
    await apply_messages(index, MessageSource("a").begin(1))
    await index.retire("a", 1)
    assert await index.sweep(0, 1) == 0
    [freed] = await stores[0].client.lrange(K.free, 0, -1)
    await apply_messages(index, MessageSource("b").begin(1))
    assert freed[:3] not in await stores[0].client.hgetall(K.holders)
    assert await stores[0].client.lrange(K.free, 0, -1) == [freed]
    long_ago = int(freed[3:]) - REUSE_MS
    await stores[0].client.lset(K.free, 0, freed[:3] + b"%d" % long_ago)
    await apply_messages(index, MessageSource("c").begin(1))
    assert freed[:3] in await stores[0].client.hgetall(K.holders)
    assert not await stores[0].client.exists(K.free)


async def test_a_sweep_takes_small_scopes_together(stores: list[Store]) -> None:
    """A scope costs as much as its content."""
    index = await open_redis_index(stores[0], partitions=1, shards=1, writer=True)
    source = MessageSource("a")
    scopes = [Scope("m", "t", None, f"tenant-{number}") for number in range(25)]
    await apply_messages(index, source.begin(1), *(source.store(scope, pack_hashes([1])) for scope in scopes))
    await index.retire("a", 1)
    await index.sweep(0, 1)  # one call
    assert not await stores[0].client.exists(*(K.blocks(scope.scope_id) for scope in scopes))


async def test_a_sweep_takes_out_only_what_is_retired_by_then(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweep may have freed the number meanwhile, and a worker may have it."""
    monkeypatch.setattr("kvatlas.index.redis.sweep.CALL_COST", 8)
    first, second = [
        await open_redis_index(stores[0], partitions=1, shards=1, writer=True, reuse_ms=0) for _ in range(2)
    ]
    a, b = MessageSource("a"), MessageSource("b")
    await apply_messages(first, a.begin(1), a.store(SCOPES[0], pack_hashes(HASHES)))
    await first.retire("a", 1)
    assert await second.sweep(0, 1) == 1  # begun
    while await first.sweep(0, 1):
        pass
    await apply_messages(first, b.begin(1), b.store(SCOPES[0], pack_hashes(HASHES)))
    for _ in range(UNDISTURBED_SWEEPS):
        await second.sweep(0, 1)
    assert await contents(first, "b") == b.held
    assert await first.digest("b") == b.digest().words
