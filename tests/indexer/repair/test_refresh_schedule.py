"""Damage done to the store by hand, under a whole replica: fresh snapshots repair it while the worker answers."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import partition_of
from kvatlas.embedded import EmbeddedServer
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.store.connection import Store
from kvatlas_indexer.repair.refresh_schedule import BLOCKS_PER_S, RefreshSchedule
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusPublisher, has_applied_all, indexed, published
from tests.indexer.running_replica import answering_requests, running_replica
from tests.kvatlas.index.damage import Damage

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
        running_replica(nats.url, valkey.url, refresh_period_s=0.3) as replica,
        answering_requests(nats_client, workers),
    ):
        for worker in workers:
            await worker.start()
            await worker.store_more(50)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        scope, key = sorted(workers[1].held, key=str)[7]
        await Damage(index, "w1").take(scope, key)
        await Damage(index, "w2").add(SCOPE, b"never...")

        async def repaired() -> bool:
            for worker in workers:
                record = await index.record(worker.worker_id)
                assert record is not None and record.answering
            return await indexed(index, *workers) == published(*workers)

        await until(repaired, what="snapshots have repaired it")
        assert replica.counters.refreshes >= 2 and replica.counters.snapshots_asked == 0
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
        running_replica(nats.url, valkey.url, refresh_period_s=0.3),
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
    assert "Traceback" not in caplog.text


def records(*incarnations: int) -> list[WorkerRecord]:
    return [WorkerRecord(f"w{number}", one, 0, 0, answering=True) for number, one in enumerate(incarnations)]


def test_each_worker_is_refreshed_once_a_period_and_large_ones_delay_others() -> None:
    schedule = RefreshSchedule(PERIOD_S, Random(1))
    known = {record.worker_id: record for record in records(1, 1, 1)}
    asked: list[tuple[float, str]] = []
    for step in range(int(10 * PERIOD_S)):
        now_s = float(step)
        record = schedule.due(list(known.values()), lambda _: True, now_s)
        if record is not None:
            asked.append((now_s, record.worker_id))
            schedule.note_request(record, 5 * BLOCKS_PER_S, now_s)
            known[record.worker_id] = replace(record, incarnation=record.incarnation + 1)
    assert all(later - earlier >= 5 for (earlier, _), (later, _) in pairwise(asked))
    for worker_id in known:
        times = [0.0, *(at_s for at_s, one in asked if one == worker_id)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert len(gaps) >= 9 and all(PERIOD_S / 2 <= gap <= PERIOD_S + 15 for gap in gaps)


def test_a_worker_that_is_not_ready_keeps_its_turn_and_a_refused_request_is_repeated() -> None:
    schedule, known = RefreshSchedule(PERIOD_S, Random(1)), records(1, 1)
    schedule.due(known, lambda _: True, 0.0)
    record = schedule.due(known, lambda one: one.worker_id == "w1", 2 * PERIOD_S)
    assert record is not None and record.worker_id == "w1"
    schedule.note_request(record, 0, 2 * PERIOD_S)
    record = schedule.due(known, lambda _: True, 2 * PERIOD_S)
    assert record is not None and record.worker_id == "w0"
    schedule.note_request(record, 0, 2 * PERIOD_S)
    assert schedule.due(known, lambda _: True, 3 * PERIOD_S - 1) is None
    assert schedule.due(known, lambda _: True, 3 * PERIOD_S) is not None
