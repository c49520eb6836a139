"""Damage done to the store by hand, under a whole replica, is found, counted and repaired while the worker answers."""

import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import partition_of
from kvatlas.embedded import EmbeddedServer
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.store.connection import Store
from kvatlas_indexer.cleanup.scrub_loop import Scrubber
from kvatlas_indexer.counters import IndexerCounters
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusPublisher, has_applied_all, indexed, published
from tests.indexer.idle_readers import owned_partitions
from tests.indexer.running_replica import answering_requests, running_replica
from tests.kvatlas.index.damage import Damage
from tests.kvatlas.index.message_source import MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

PERIOD_S = 100.0


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, partitions=PARTITIONS, shards=1, writer=True)


async def test_blocks_changed_by_hand_are_repaired(
    nats: EmbeddedServer, valkey: EmbeddedServer, nats_client: Client, index: RedisIndex
) -> None:
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(3)]
    async with (
        running_replica(nats.url, valkey.url, scrub_period_s=0.3) as replica,
        answering_requests(nats_client, workers),
    ):
        for worker in workers:
            await worker.start()
            await worker.store_more(50)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        await until(lambda: replica.counters.scrubs >= 2, what="two scrubs are over")
        assert replica.counters.scrub_damaged == 0
        scope, key = sorted(workers[1].held, key=str)[7]
        await Damage(index, "w1").take(scope, key)
        await Damage(index, "w2").add(SCOPE, b"never...")

        async def repaired() -> bool:
            for worker in workers:
                record = await index.record(worker.worker_id)
                assert record is not None and record.answering
            return await indexed(index, *workers) == published(*workers)

        await until(repaired, what="snapshots have repaired it")
        assert replica.counters.scrub_damaged >= 2
        assert workers[0].incarnation == 1
        assert await contents(index, "w0") == workers[0].held
        await until(lambda: replica.retired_holders == 0, what="the damaged holders are swept")


@pytest.mark.parametrize("garbage", [b"\xc1", msgpack.packb(["x"] * 15)])
async def test_digests_names_and_positions_that_can_not_be_read_are_repaired(
    nats: EmbeddedServer,
    valkey: EmbeddedServer,
    nats_client: Client,
    store: Store,
    index: RedisIndex,
    caplog: pytest.LogCaptureFixture,
    garbage: bytes,
) -> None:
    keys = ShardKeys(0)
    reader = ShardReader(store, keys)
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(4)]
    async with (
        running_replica(nats.url, valkey.url, scrub_period_s=0.3) as replica,
        answering_requests(nats_client, workers),
    ):
        for worker in workers:
            await worker.start()
            await worker.store_more(20)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        records = await reader.records()
        holders = [records[worker.worker_id].active for worker in workers]
        await store.client.hset(keys.digests, holders[1], garbage)
        await store.client.hset(keys.active, holders[2], b"\xff" + garbage)
        await store.client.hset(keys.active, b"\x01" + holders[2], b"w2")
        await store.client.hset(keys.partitions, str(partition_of("w3", PARTITIONS)), b"\xff" + garbage)
        for worker in workers:
            await worker.store_more(5)

        async def repaired() -> bool:
            return await indexed(index, *workers) == published(*workers) and None not in [
                await index.digest(worker.worker_id) for worker in workers
            ]

        await until(repaired, what="snapshots have repaired it")
        await until(lambda: replica.counters.scrub_damaged, what="the damage is counted")
        assert workers[0].incarnation == 1
    assert "Traceback" not in caplog.text


async def test_each_owned_shard_is_scrubbed_once_a_period() -> None:
    index, counters = MemoryIndex(shards=4), IndexerCounters()
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, b"12345678"))
    async with owned_partitions(0, 2, 4) as owned:
        scrubber = Scrubber(index, counters, owned, PERIOD_S)
        await scrubber.tick(1_000.0)
        assert counters.scrubs == 0
        await scrubber.tick(1_000.0 + PERIOD_S)
        assert counters.scrubs == 2  # shards 0 and 2
        await scrubber.tick(1_001.0 + PERIOD_S)
        assert counters.scrubs == 2
        owned.start([3])
        await scrubber.tick(1_000.0 + 2 * PERIOD_S)
        assert counters.scrubs == 4
        await scrubber.tick(1_000.0 + 3 * PERIOD_S)
        assert counters.scrubs == 7
