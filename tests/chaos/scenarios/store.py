"""Faults of Redis: restarts, lost data, lost functions."""

import shutil
from pathlib import Path

from anyio.to_thread import run_sync

from kvatlas.identity import partition_of, shard_of
from tests.chaos.chaos import Chaos
from tests.chaos.fleet import PARTITIONS, SHARDS, Fleet

AOF = "appendonlydir"


def _aof(fleet: Fleet) -> Path:
    return fleet.valkey.process.data_dir / AOF


async def redis_killed_and_restarted_with_its_data(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.valkey.kill()
    chaos.fault("Redis SIGKILL")
    await chaos.moved(10)
    await chaos.fleet.valkey.start()
    chaos.healed()


async def redis_restarted_without_its_data(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.valkey.kill()
    chaos.fault("Redis SIGKILL, data removed")
    await run_sync(shutil.rmtree, _aof(chaos.fleet))
    await chaos.fleet.valkey.start()
    chaos.healed()


async def redis_fails_over_to_older_data(chaos: Chaos) -> None:
    """As with a replica that misses the last writes."""
    fleet = chaos.fleet
    await chaos.moved(10)
    older = fleet.folder / "older-aof"
    await run_sync(shutil.copytree, _aof(fleet), older)
    await chaos.moved(10)
    await fleet.valkey.kill()
    chaos.fault("Redis SIGKILL, last writes lost")
    await run_sync(shutil.rmtree, _aof(fleet))
    await run_sync(shutil.move, older, _aof(fleet))
    await fleet.valkey.start()
    chaos.healed()


async def redis_flushed(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.store.client.flushall()
    chaos.fault("FLUSHALL")


async def redis_functions_flushed(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.store.client.function_flush()
    chaos.fault("FUNCTION FLUSH")
    await chaos.moved(10)


async def one_shard_wiped(chaos: Chaos) -> None:
    await chaos.moved(10)
    client = chaos.fleet.store.client
    shard = shard_of(partition_of(chaos.fleet.workers[0].worker_id, PARTITIONS), SHARDS)
    async for key in client.scan_iter(match=f"kva:{{s{shard}}}:*"):
        await client.unlink(key)
    chaos.fault(f"every key of shard {shard} deleted")


SCENARIOS = (
    redis_killed_and_restarted_with_its_data,
    redis_restarted_without_its_data,
    redis_fails_over_to_older_data,
    redis_flushed,
    redis_functions_flushed,
    one_shard_wiped,
)
