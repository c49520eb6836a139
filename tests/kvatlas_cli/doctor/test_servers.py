"""Servers made wrong on purpose: each fault is one finding that says what to do."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import DiscardPolicy, StreamConfig

from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import STREAM
from kvatlas.embedded import valkey_server
from kvatlas.embedded.cluster import ClusterProcesses
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.keys import LAYOUT
from kvatlas.index.redis.layout import make_layout
from kvatlas.store.connection import open_store
from kvatlas_cli.doctor import Level, examine
from kvatlas_cli.doctor.stream import judge_stream
from tests.eventually import until
from tests.kvatlas_cli.doctor.installation import Installation

pytestmark = pytest.mark.anyio

NOWHERE = "127.0.0.1:1"


async def test_servers_that_are_away_are_errors_and_the_other_is_looked_at_all_the_same(system: Installation) -> None:
    found = await examine(f"nats://{NOWHERE}", system.valkey.url, listen_s=0.05)
    assert [one.check for one in found if one.level is Level.ERROR] == [
        "store.functions",
        "nats.reachable",
        "store.layout",
    ]
    assert any(one.check == "store.policy" and one.level is Level.OK for one in found)
    found = await examine(system.nats.url, f"redis://{NOWHERE}", listen_s=0.05)
    assert [one.check for one in found if one.level is Level.ERROR] == ["store.reachable", "nats.stream"]


async def test_a_store_that_evicts_or_is_slow_for_small_scopes(system: Installation) -> None:
    for check in ("store.policy", "store.listpack"):
        assert [one.level for one in await system.said(check)] == [Level.OK]
    await system.config(maxmemory_policy="allkeys-lru", hash_max_listpack_entries=512)
    policy, listpack = await system.wrong("store.policy"), await system.wrong("store.listpack")
    assert policy.level is Level.ERROR and "allkeys-lru" in policy.line
    assert policy.advice == "CONFIG SET maxmemory-policy noeviction"
    assert listpack.level is Level.WARNING and "hash-max-listpack-entries 512" in listpack.line


async def test_a_store_without_room(system: Installation) -> None:
    assert (await system.wrong("store.memory")).level is Level.INFO  # no limit
    used = int((await system.store.client.info("memory"))["used_memory"])
    for share, level in ((0.97, Level.ERROR), (0.8, Level.WARNING)):
        await system.config(maxmemory=int(used / share))
        assert (await system.wrong("store.memory")).level is level
    await system.config(maxmemory=used * 10)
    assert [one.level for one in await system.said("store.memory")] == [Level.OK]


async def test_a_store_without_functions_or_with_others(system: Installation) -> None:
    assert "no function library" in (await system.wrong("store.functions")).line
    await make_layout(system.store, None, None)
    await system.said("indexers.members")
    assert await system.store.client.function_list() == []  # it only looks
    await open_redis_index(system.store, writer=True)
    assert [one.level for one in await system.said("store.functions")] == [Level.OK]
    await system.store.load_functions("#!lua name=kvatlas\nredis.register_function('kvatlas_old', function() end)")
    other = await system.wrong("store.functions")
    assert other.level is Level.WARNING and "kvatlas of another version" in other.line


async def test_a_store_laid_out_by_another_version(system: Installation) -> None:
    assert "no indexer has laid out" in (await system.wrong("store.layout")).line
    await open_redis_index(system.store, writer=True)
    await system.store.client.hset(LAYOUT, "version", "99")
    wrong = await system.wrong("store.layout")
    assert wrong.level is Level.ERROR and "layout version 99" in wrong.line


async def test_a_replica_that_cannot_save(system: Installation, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    async with valkey_server(data_dir=folder) as primary:
        host, _, port = primary.url.removeprefix("redis://").rpartition(":")
        store = await open_store(primary.url, wait=False)
        shutil.rmtree(folder)
        await store.client.bgsave()

        async def has_failed() -> bool:
            return bool((await store.client.info("persistence"))["rdb_last_bgsave_status"] == "err")

        await until(has_failed, what="the save failed")
        found = await examine(system.nats.url, primary.url, listen_s=0.05)
        assert [one.level for one in found if one.check == "store.persistence"] == [Level.ERROR]
        await store.close()
        await system.store.client.replicaof(host, port.partition("/")[0])
        (role,) = await system.said("store.role")
        assert role.level is Level.ERROR and "is a replica" in role.line


async def test_each_node_of_a_cluster_is_looked_at(system: Installation) -> None:
    with ClusterProcesses() as nodes:
        found = await examine(system.nats.url, nodes.url, listen_s=0.05)
    policies = [one for one in found if one.check == "store.policy"]
    assert len(policies) == 3 and all(one.level is Level.OK and one.line.startswith("node ") for one in policies)


async def test_there_is_no_stream(system: Installation) -> None:
    assert f"no stream {STREAM}" in (await system.wrong("nats.stream")).line
    await ensure_stream(system.client, StreamSettings(storage="memory"))
    assert [one.level for one in await system.said("nats.stream")] == [Level.OK]
    (limits,) = await system.said("nats.limits")
    assert limits.level is Level.OK and "30 min, 1,024 MiB, in memory, 1 replica" in limits.line


async def test_a_stream_made_by_somebody_else(system: Installation) -> None:
    config = StreamConfig(
        name=STREAM, subjects=["other.>"], discard=DiscardPolicy.NEW, max_msgs=10, max_msg_size=1_024, no_ack=True
    )
    await system.client.jetstream().add_stream(config)
    assert "other.>" in (await system.wrong("nats.subjects")).line
    lines = [one.line for one in await system.said("nats.limits")]
    assert all(one.level is Level.ERROR for one in await system.said("nats.limits"))
    for part in ("discards new", "takes messages of 1,024 bytes", "max_msgs 10", "acknowledges nothing"):
        assert sum(part in line for line in lines) == 1


async def test_a_stream_that_reaches_back_for_moments_only(system: Installation) -> None:
    await ensure_stream(system.client, StreamSettings(storage="memory", max_bytes=20_000))
    jetstream = system.client.jetstream()
    for _ in range(30):
        await jetstream.publish("kvatlas.events.0.w", bytes(1_000))
    short = await system.wrong("nats.stream")
    assert short.level is Level.WARNING and "reach back" in short.line and "max_bytes" in short.advice


def test_a_server_that_takes_small_messages_only_is_said() -> None:
    config: dict[str, Any] = {"subjects": ["kvatlas.events.*.*"], "retention": "limits", "discard": "old"}
    found = list(judge_stream(config, {}, 65_536, 0))
    assert [one.level for one in found if one.check == "nats.payload"] == [Level.INFO]
