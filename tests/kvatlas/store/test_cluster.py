"""Calls to a cluster whose slots move, whose primaries change, and whose replicas are read."""

import os
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import pytest
from redis.crc import key_slot

from kvatlas.embedded import EmbeddedServer
from kvatlas.errors import Unreachable, UnsuitableStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.reservations import RedisReservations
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import Store, connected_store
from tests.chaos.clusters.store_cluster import StoreCluster, store_cluster
from tests.eventually import until
from tests.kvatlas.reservations.asks import POOL
from tests.router.admission.routers import Pool, routers_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not os.environ.get("KVATLAS_CLUSTERS"),
        reason="six servers that fail over want a machine of their own: make clusters",
    ),
]

CODE = """#!lua name=pairs
redis.register_function('put', function(keys, args)
  for _, key in ipairs(keys) do redis.call('SET', key, args[1]) end
  return args[1]
end)
redis.register_function{
  function_name = 'read',
  callback = function(keys) return redis.call('MGET', unpack(keys)) end,
  flags = { 'no-writes' },
}"""
KEYS = ["{tag}:a", "{tag}:b"]
SLOT = key_slot(b"tag")


@pytest.fixture(scope="module")
async def cluster() -> AsyncIterator[StoreCluster]:
    async with store_cluster() as running:
        yield running


@pytest.fixture
async def store(cluster: StoreCluster) -> AsyncIterator[Store]:
    async with connected_store(cluster.url, wait=False) as opened:
        await opened.load_functions(CODE)
        yield opened


async def primary_and_other(cluster: StoreCluster) -> tuple[EmbeddedServer, EmbeddedServer]:
    """The primary that has the keys' slot, and one that doesn't."""
    has_it = await cluster.primary_of(SLOT)
    assert has_it is not None
    return has_it, next(node for node in await cluster.primaries() if node is not has_it)


async def put(store: Store, text: str) -> None:
    """Put the block, twice if the cluster is just changing, as the indexer does."""

    async def is_put() -> bool:
        try:
            return bool(await store.fcall("put", KEYS, [text]) == text.encode())
        except Unreachable:
            return False

    await until(is_put, what=f"{text} is put")


async def read(store: Store) -> list[bytes]:
    (found,) = await store.fcall_ro_many("read", [(KEYS, [])])
    return list(found)


async def test_calls_follow_a_slot_that_moves_in_one_step(cluster: StoreCluster, store: Store) -> None:
    await put(store, "before")
    source, target = await primary_and_other(cluster)
    await cluster.move_slots(source, SLOT, SLOT, target)
    assert await read(store) == [b"before", b"before"]
    await put(store, "after")
    assert await read(store) == [b"after", b"after"]


async def test_calls_are_never_half_done_while_a_slot_moves_key_by_key(cluster: StoreCluster, store: Store) -> None:
    await put(store, "0")
    source, target = await primary_and_other(cluster)
    seen: list[list[bytes]] = []
    moved = anyio.Event()

    async def write_and_read() -> None:
        number = 0
        while not moved.is_set():
            number += 1
            await put(store, str(number))
            seen.append(await read(store))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_and_read)
        await cluster.move_slot_by_keys(source, SLOT, target, 0.2)
        moved.set()
    assert seen and all(first == second for first, second in seen)
    assert await cluster.primary_of(SLOT) is target


async def test_calls_go_on_at_the_replica_that_takes_over(cluster: StoreCluster, store: Store) -> None:
    await put(store, "before")
    primary, _ = await primary_and_other(cluster)
    await primary.kill()
    await put(store, "after")
    assert await read(store) == [b"after", b"after"]
    await primary.start()
    await cluster.wait_until_whole()


async def test_a_store_opens_while_any_one_server_of_its_cluster_is_away(cluster: StoreCluster, store: Store) -> None:
    await put(store, "text")
    primary = await cluster.primary_of(SLOT)
    for node, line in zip(cluster.nodes, cluster.lines, strict=True):
        line.cut()
        try:
            async with connected_store(cluster.url, wait=False) as opened:
                assert node is primary or await read(opened) == [b"text", b"text"]
        finally:
            line.heal()


async def test_a_primary_that_evicts_keys_is_refused_by_its_name(cluster: StoreCluster, store: Store) -> None:
    for primary in await cluster.primaries():
        await cluster.command(primary, "CONFIG SET", "maxmemory-policy", "allkeys-lru")
        try:
            line = cluster.lines[cluster.nodes.index(primary)]
            with pytest.raises(UnsuitableStore, match=rf":{line.port}: maxmemory-policy is allkeys-lru"):
                await open_redis_index(store, writer=True)
        finally:
            await cluster.command(primary, "CONFIG SET", "maxmemory-policy", "noeviction")


async def reads_at(cluster: StoreCluster, node: EmbeddedServer) -> int:
    """Number of read calls that the node has answered."""
    found = await cluster.command(node, "INFO", "commandstats")
    return int(found.get("cmdstat_fcall_ro", {}).get("calls", 0))


async def test_replicas_are_read_while_they_hear_from_their_primary(cluster: StoreCluster) -> None:
    access = RedisAccess(cluster.url, read_replicas=True)
    async with connected_store(access, wait=False) as store:
        await store.load_functions(CODE)
        await put(store, "text")
        primary, _ = await primary_and_other(cluster)
        replica = await cluster.replica_of(primary)

        async def is_read_at(node: EmbeddedServer) -> bool:
            await put(store, "text")  # nothing is heard of a silent primary
            before = await reads_at(cluster, node)
            return await read(store) == [b"text", b"text"] and await reads_at(cluster, node) > before

        await until(lambda: is_read_at(replica), what="the replica is read")
        await replica.kill()
        assert await read(store) == [b"text", b"text"]
        await until(lambda: is_read_at(primary), what="the primary is read instead")
        await replica.start()
        await cluster.wait_until_whole()
        await until(lambda: is_read_at(replica), what="the replica is read again")


async def test_a_replica_that_does_not_hear_from_its_primary_is_not_read(cluster: StoreCluster) -> None:
    async with connected_store(RedisAccess(cluster.url, read_replicas=True), wait=False) as store:
        await put(store, "text")
        primary, _ = await primary_and_other(cluster)
        replica = await cluster.replica_of(primary)
        await cluster.command(primary, "CONFIG SET", "repl-ping-replica-period", 3_600)
        try:

            async def is_read_at_primary() -> bool:
                before = await reads_at(cluster, replica)
                return await read(store) == [b"text", b"text"] and await reads_at(cluster, replica) == before

            await until(is_read_at_primary, what="the primary is read instead")
        finally:
            await cluster.command(primary, "CONFIG SET", "repl-ping-replica-period", 10)


async def test_the_queue_goes_on_after_a_failover(cluster: StoreCluster, store: Store) -> None:
    pool = Pool(RedisReservations(store), ("a",), runs_s=0.02)
    async with routers_of(pool, 3) as routers, anyio.create_task_group() as tasks:
        running = await routers[0].admit("before")
        for number in range(12):
            tasks.start_soon(routers[number % 3].run, "flood" if number < 9 else "modest")
        await until(lambda: sum(router.queue.waiting() for router in routers) == 12, what="they wait")
        primary = await cluster.primary_of(key_slot(pool_keys(POOL)[0].encode()))
        assert primary is not None
        await cluster.fail_over(await cluster.replica_of(primary))

        async def is_ended() -> bool:
            with suppress(Unreachable):
                await routers[0].end(running)
                return True
            return False

        await until(is_ended, what="the running one ends")
        await until(lambda: len(pool.served) >= 13, what="all are served")
    tenants = [tenant for tenant, _ in pool.served[1:]]
    assert 2 <= tenants[:6].count("modest") <= 3
