"""Faults of Redis: restarts, lost data, lost functions."""

import shutil
from pathlib import Path

from anyio.to_thread import run_sync
from redis.asyncio import Redis

from benchmarks.store_calls import SLOW_LOG
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.embedded import valkey_server
from kvatlas.identity import shard_of
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.chaos.fleet import PARTITIONS, SHARDS, Fleet
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

AOF = "appendonlydir"
LITTLE_BYTES = 100_000
"""Less than an empty server uses."""
NO_LIMIT = 0
NO_TIER = 1 << 6
"""A bit of an entry that no tier has."""


async def limit_memory(store: Store, limit_bytes: int) -> None:
    await store.client.config_set("maxmemory", limit_bytes)


def _aof(fleet: Fleet) -> Path:
    return fleet.valkey.process.data_dir / AOF


async def redis_killed_and_restarted_with_its_data(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.valkey.kill()
    run.record_fault("Redis SIGKILL")
    await run.wait_for_answers(10)
    await run.fleet.valkey.start()
    run.mark_healed()


async def redis_restarted_without_its_data(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.valkey.kill()
    run.record_fault("Redis SIGKILL, data removed")
    await run_sync(shutil.rmtree, _aof(run.fleet))
    await run.fleet.valkey.start()
    run.mark_healed()


async def redis_fails_over_to_older_data(run: ScenarioRun) -> None:
    """As if to a replica that misses the last writes."""
    fleet = run.fleet
    await run.wait_for_answers(10)
    older = fleet.folder / "older-aof"
    await run_sync(shutil.copytree, _aof(fleet), older)
    await run.wait_for_answers(10)
    await fleet.valkey.kill()
    run.record_fault("Redis SIGKILL, last writes lost")
    await run_sync(shutil.rmtree, _aof(fleet))
    await run_sync(shutil.move, older, _aof(fleet))
    await fleet.valkey.start()
    run.mark_healed()


async def redis_fails_over_to_a_replica(run: ScenarioRun) -> None:
    """The replica misses the last writes, and is still read-only when the indexers write to it."""
    fleet = run.fleet
    replica = await fleet.stack.enter_async_context(
        valkey_server(
            data_dir=fleet.folder / "replica", appendonly=True, settings={"repl-diskless-sync-delay": "0", **SLOW_LOG}
        )
    )
    line = await fleet.stack.enter_async_context(TcpProxy(fleet.valkey.port, "replica to primary"))
    async with Redis.from_url(replica.url) as client:
        await client.replicaof(LOOPBACK, line.port)

        async def is_in_sync() -> bool:
            return bool((await client.info("replication"))["master_link_status"] == "up")

        await until(is_in_sync, what="the replica has the primary's data")
        await run.wait_for_answers(10)
        line.cut()
        await run.wait_for_answers(10)
        await fleet.valkey.kill()
        await fleet.switch_store(replica)
        run.record_fault("Redis SIGKILL, replaced by a replica without the last writes, still read-only")
        await run.wait_for_answers(20)
        await client.replicaof("NO", "ONE")
    run.mark_healed()


async def redis_flushed(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.store.client.flushall()
    run.record_fault("FLUSHALL")


async def redis_functions_flushed(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.store.client.function_flush()
    run.record_fault("FUNCTION FLUSH")
    await run.wait_for_answers(10)


async def free_memory(run: ScenarioRun) -> None:
    await limit_memory(run.fleet.store, NO_LIMIT)
    run.mark_healed()


async def redis_out_of_memory(run: ScenarioRun) -> None:
    """Workers whose blocks can't be stored are closed one by one, and come back when there is room."""
    fleet = run.fleet
    await run.wait_for_answers(10)
    await limit_memory(fleet.store, LITTLE_BYTES)
    run.record_fault("Redis out of memory")

    async def are_closed() -> bool:
        index = await open_redis_index(fleet.store, writer=False)
        records = [await index.record(worker.worker_id) for worker in fleet.workers]
        return all(record is not None and record.oom for record in records)

    await until(are_closed, what="every worker that stores is closed")
    await run.wait_for_answers(10)
    await free_memory(run)


async def one_shard_wiped(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    client = run.fleet.store.client
    shard = shard_of(partition_of(run.fleet.workers[0].worker_id, PARTITIONS), SHARDS)
    async for key in client.scan_iter(match=f"kva:{{s{shard}}}:*"):
        await client.unlink(key)
    run.record_fault(f"every key of shard {shard} deleted")


async def damage_by_hand(store: Store) -> list[str]:
    """Damage each scope that has enough blocks; returns the faults. Raises RedisError."""
    damaged: list[str] = []
    async for key in store.client.scan_iter(match="kva:{s*}:blocks:*"):
        blocks = sorted((await store.client.hgetall(key)).items())
        if len(blocks) < 10:
            continue
        (gone, _), (_, value), (turned, flags) = blocks[1], blocks[4], blocks[7]
        await store.client.hdel(key, gone)
        await store.client.hset(key, b"\x00no-such", value)
        await store.client.hset(key, turned, flags[:3] + bytes([flags[3] ^ Tier.LOCAL_SSD.flag]) + flags[4:])
        malformed, flags = blocks[9]
        await store.client.hset(key, malformed, flags[:3] + bytes([flags[3] ^ NO_TIER]) + flags[4:])
        whats = ("block removed", "block added", "tier flag changed", "flag of no tier set")
        damaged += [f"{what} by hand" for what in whats]
        marks_key = key.replace(b":blocks:", b":marks:")
        marks = [field for field in await store.client.hkeys(marks_key) if len(field) == HASH_BYTES]
        if marks:
            await store.client.hdel(marks_key, min(marks))
            damaged.append("mark removed by hand")
    return damaged


async def blocks_damaged_by_hand(run: ScenarioRun) -> None:
    """The damage comes from no message, so no message reveals it; the scrub finds it, and no worker vanishes from the index
    meanwhile."""
    fleet = run.fleet
    await run.wait_for_answers(20)
    damaged = await damage_by_hand(fleet.store)
    assert damaged, "there are blocks to damage"
    for what in damaged:
        run.record_fault(what)
    index = await open_redis_index(fleet.store, writer=False)

    async def incarnations() -> list[int]:
        records = [await index.record(worker.worker_id) for worker in fleet.workers]
        return [record.incarnation for record in records if record is not None]

    before = await incarnations()

    async def is_repaired() -> bool:
        return await incarnations() != before

    # under load, without a pause that would help to find it
    await until(is_repaired, what="a damaged worker has a new incarnation")
    await fleet.load.pause()
    await run.wait_until_exact_and_never_empty()


SCENARIOS = (
    blocks_damaged_by_hand,
    redis_fails_over_to_a_replica,
    redis_killed_and_restarted_with_its_data,
    redis_restarted_without_its_data,
    redis_fails_over_to_older_data,
    redis_flushed,
    redis_functions_flushed,
    redis_out_of_memory,
    one_shard_wiped,
)
