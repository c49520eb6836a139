"""A store without memory, without its functions, read-only, or evicting, under a whole replica and its readers."""

import asyncio
import logging

import pytest
from nats.aio.client import Client
from redis.exceptions import ReadOnlyError

from kvatlas.embedded import EmbeddedServer, valkey_server
from kvatlas.errors import Unreachable, UnsuitableStore
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, LEASES, FleetStore
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.settings import IndexerSettings
from kvatlas.store.connection import Store, connected_store
from kvatlas_cli.doctor.store import own_libraries
from kvatlas_indexer.gauges import gauges_of
from kvatlas_indexer.service import run_indexer
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusPublisher, has_applied_all, indexed, published
from tests.indexer.running_replica import answering_requests, running_replica
from tests.kvatlas.index.message_source import split

pytestmark = pytest.mark.anyio


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, partitions=PARTITIONS, shards=1, writer=True)


async def limit_memory(store: Store, bytes_: int) -> None:
    await store.client.config_set("maxmemory", bytes_)


async def last_lease_ms(store: Store) -> int:
    """The time at which the last lease ends, by the store's clock."""
    return max(int(lease.split()[0]) for lease in await store.client.hvals(LEASES))


async def test_without_memory_removals_and_sweeps_go_on_and_the_index_is_exact_again_when_there_is_room(
    nats: EmbeddedServer,
    valkey: EmbeddedServer,
    nats_client: Client,
    index: RedisIndex,
    store: Store,
    fleet: FleetStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calm, growing, late = workers = [BusPublisher(nats_client, f"w{i}") for i in range(3)]
    async with running_replica(nats.url, valkey.url) as replica, answering_requests(nats_client, workers):
        await calm.start()
        await calm.store_more(100)
        await growing.start()
        await growing.store_more(2_000)
        await until(lambda: has_applied_all(index, calm, growing), what="both are applied")
        await limit_memory(store, 100_000)  # less than an empty server uses

        await growing.store_more(1)
        first = sorted(key for _, key in calm.held)[-10:]
        await calm.send(calm.remove(SCOPE, b"".join(reversed(first))))
        await late.start()
        await late.store_more(5)

        async def closed() -> bool:
            records = [await index.record(worker.worker_id) for worker in workers]
            return [record is not None and record.oom and record.closed for record in records] == [False, True, True]

        await until(closed, what="the workers with new blocks are closed")
        await until(lambda: has_applied_all(index, calm), what="the removal is applied")
        assert (await indexed(index, calm)) == published(calm)
        assert await indexed(index, growing, late) == {"w1": {}, "w2": {}}
        await until(
            lambda: replica.retired_holders == 0 and replica.counters.sweeps > 0, what="the retired holders are swept"
        )
        await until(lambda: replica.workers_without_room == 2, what="two workers are reported as left out")
        assert gauges_of(replica).shards_out_of_memory == 1
        assert replica.counters.store_full > 0
        assert any("out of memory" in record.message for record in caplog.records if record.levelno == logging.ERROR)
        beats = replica.counters.fleet_writes
        await until(lambda: replica.counters.fleet_writes > beats + 6, what="fleet records are still written")
        renewed = await last_lease_ms(store)

        async def are_leases_renewed() -> bool:
            return await last_lease_ms(store) > renewed

        await until(are_leases_renewed, what="leases are still renewed")
        lines = [one.message for one in caplog.records]
        assert not [line for line in lines if "leases were not renewed" in line and "maxmemory" in line]
        assert (growing.incarnation, late.incarnation) == (1, 1)

        await limit_memory(store, 0)

        async def exact() -> bool:
            return await indexed(index, *workers) == published(*workers)

        await until(exact, what="all snapshots are applied")
        assert calm.incarnation == 1
        await until(lambda: replica.workers_without_room == 0, what="no worker is left out")
        assert gauges_of(replica).shards_out_of_memory == 0


async def test_an_emptied_store_without_room_for_its_layout_is_an_alarm_and_one_clear_line(
    nats: EmbeddedServer,
    valkey: EmbeddedServer,
    nats_client: Client,
    index: RedisIndex,
    store: Store,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = BusPublisher(nats_client, "w0")
    caplog.set_level(logging.INFO)
    async with running_replica(nats.url, valkey.url) as replica, answering_requests(nats_client, [worker]):
        await worker.start()
        await worker.store_more()
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        await limit_memory(store, 1)
        await store.client.flushall()
        line = "it is out of memory (maxmemory), so no layout can be created"
        await until(lambda: any(line in one.message for one in caplog.records), what="the line is logged")
        await until(lambda: gauges_of(replica).shards_out_of_memory == 1, what="the alarm")
        await limit_memory(store, 0)
        await until(lambda: has_applied_all(index, worker), what="its snapshot is applied")
        assert await indexed(index, worker) == published(worker)


async def test_functions_that_were_flushed_are_loaded_again(
    nats: EmbeddedServer, valkey: EmbeddedServer, nats_client: Client, index: RedisIndex, store: Store
) -> None:
    worker = BusPublisher(nats_client, "w0")
    chain = b""
    async with running_replica(nats.url, valkey.url) as replica, answering_requests(nats_client, [worker]):
        await worker.start()
        await worker.store_more(20)
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        chain = b"".join(key for _, key in sorted(worker.held, key=lambda held: split(held[1])))
        reader = await open_redis_index(store, writer=False)
        await store.client.function_flush()

        assert (await reader.overlap(SCOPE, chain)).depths() == {"w0": 20}
        await store.client.function_flush()
        for _ in range(50):
            await worker.store_more(1)
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        assert await indexed(index, worker) == published(worker)
        assert replica.counters.gaps == replica.counters.failed_checks == 0


async def test_a_store_that_evicts_is_refused(nats: EmbeddedServer) -> None:
    async with valkey_server(settings={"maxmemory-policy": "allkeys-lru"}) as evicting:
        with pytest.raises(UnsuitableStore, match="maxmemory-policy is allkeys-lru; expected noeviction"):
            await run_indexer(IndexerSettings.load(nats_url=nats.url, redis_url=evicting.url))


async def test_a_store_that_starts_to_evict_is_an_error_in_the_log(
    nats: EmbeddedServer, valkey: EmbeddedServer, store: Store, nats_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_replica(nats.url, valkey.url) as replica:
        await store.client.config_set("maxmemory-policy", "allkeys-lru")
        await until(
            lambda: any("the store evicts keys" in one.message for one in caplog.records), what="the line is logged"
        )
        assert gauges_of(replica).shards_evicting == 1
        await store.client.config_set("maxmemory-policy", "noeviction")
        await until(lambda: not gauges_of(replica).shards_evicting, what="the alarm is over")


async def test_without_memory_and_functions_there_is_an_alarm_and_the_index_is_exact_again_when_there_is_room(
    nats: EmbeddedServer, valkey: EmbeddedServer, nats_client: Client, index: RedisIndex, store: Store
) -> None:
    worker = BusPublisher(nats_client, "w0")
    async with running_replica(nats.url, valkey.url) as replica, answering_requests(nats_client, [worker]):
        await worker.start()
        await worker.store_more()
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        await limit_memory(store, 1)
        await store.client.function_flush()
        await worker.store_more()
        await until(lambda: replica.counters.store_full > 0, what="the alarm")
        await limit_memory(store, 0)
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        assert await indexed(index, worker) == published(worker)


async def test_functions_of_another_version_stay_at_start(
    nats: EmbeddedServer, valkey: EmbeddedServer, store: Store
) -> None:
    """Processes of that version may be running."""
    families = [library.family for library in (INDEX_LIBRARY, FLEET_LIBRARY, POOL_LIBRARY)]
    for family in families:
        await store.client.function_load(f"#!lua name={family}\nredis.register_function('{family}', function() end)")
    async with running_replica(nats.url, valkey.url):
        assert {*families, *own_libraries()} <= set(await store.list_libraries())


async def test_a_read_only_store_is_refused_at_start_and_retried_later(
    nats: EmbeddedServer, valkey: EmbeddedServer, nats_client: Client, index: RedisIndex, store: Store
) -> None:
    worker = BusPublisher(nats_client, "w0")
    async with (
        valkey_server() as primary,
        running_replica(nats.url, valkey.url) as replica,
        answering_requests(nats_client, [worker]),
    ):
        await worker.start()
        await worker.store_more()
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        await store.client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
        with pytest.raises(UnsuitableStore, match="is a replica; expected a primary"):
            await run_indexer(IndexerSettings.load(nats_url=nats.url, redis_url=valkey.url))
        errors = replica.counters.store_errors
        await worker.store_more()
        await until(lambda: replica.counters.store_errors > errors, what="a write is refused")
        await store.client.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        assert await indexed(index, worker) == published(worker)


async def test_a_write_to_a_read_only_store_is_one_line(valkey: EmbeddedServer, index: RedisIndex) -> None:
    async with connected_store(valkey.url, wait=False) as store:
        await store.client.execute_command("REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(Unreachable, match="read-only") as caught:
            await store.fcall(INDEX_LIBRARY.function("kvatlas_retire"), ["a", "b", "c", "d", "e"], ["w", b"\0" * 8])
        assert not isinstance(caught.value, ReadOnlyError)


async def test_an_indexer_starts_on_a_full_store_that_has_its_functions() -> None:
    async with valkey_server() as server, connected_store(server.url, wait=False) as store:
        await open_redis_index(store, writer=True)
        await store.client.config_set("maxmemory", "1")
        await open_redis_index(store, writer=True)
        await store.client.config_set("maxmemory", "0")
        await store.client.execute_command("FUNCTION FLUSH")
        await store.client.config_set("maxmemory", "1")
        with pytest.raises(Unreachable, match="out of memory"):
            await open_redis_index(store, writer=True)


async def test_an_indexer_waits_for_an_empty_store_to_have_room() -> None:
    async with (
        valkey_server() as server,
        asyncio.TaskGroup() as tasks,
        connected_store(server.url, wait=False) as store,
    ):
        await limit_memory(store, 1)
        lines: list[str] = []
        opening = tasks.create_task(open_redis_index(store, writer=True, wait=True, on_wait=lines.append))
        await until(lambda: lines, what="the line is logged")
        assert (
            lines[0]
            == f"{store.name}: it is out of memory (maxmemory), so no layout can be created; retrying in 0.25 s"
        )
        await limit_memory(store, 0)
        assert (await opening).shards == 1
