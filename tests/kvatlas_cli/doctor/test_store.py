"""Faults of the store: each is one finding that says what to do."""

import shutil
from pathlib import Path

import pytest

from kvatlas.embedded import valkey_server
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.keys import LAYOUT
from kvatlas.index.redis.layout import make_layout
from kvatlas.store.connection import open_store
from kvatlas_cli.doctor import Level, examine
from tests.eventually import until
from tests.kvatlas_cli.doctor.installation import Installation
from tests.valkey_cluster import ClusterProcesses

pytestmark = pytest.mark.anyio


async def test_an_evicting_policy_and_large_listpacks_are_found(installation: Installation) -> None:
    for check in ("store.policy", "store.listpack"):
        assert [one.level for one in await installation.findings(check)] == [Level.OK]
    await installation.configure_store(maxmemory_policy="allkeys-lru", hash_max_listpack_entries=512)
    policy, listpack = await installation.problem("store.policy"), await installation.problem("store.listpack")
    assert policy.level is Level.ERROR and "allkeys-lru" in policy.line
    assert policy.advice == "CONFIG SET maxmemory-policy noeviction"
    assert listpack.level is Level.WARNING and "hash-max-listpack-entries 512" in listpack.line


async def test_a_store_that_is_running_out_of_memory_is_found(installation: Installation) -> None:
    assert (await installation.problem("store.memory")).level is Level.INFO  # no limit
    used = int((await installation.store.client.info("memory"))["used_memory"])
    for share, level in ((0.97, Level.ERROR), (0.8, Level.WARNING)):
        await installation.configure_store(maxmemory=int(used / share))
        assert (await installation.problem("store.memory")).level is level
    await installation.configure_store(maxmemory=used * 10)
    assert [one.level for one in await installation.findings("store.memory")] == [Level.OK]


async def test_a_store_whose_connections_are_nearly_all_taken_is_found(installation: Installation) -> None:
    assert [one.level for one in await installation.findings("store.connections")] == [Level.OK]
    taken = [await open_store(installation.valkey.url, wait=False) for _ in range(20)]
    for one in taken:
        await one.client.ping()
    used = int((await installation.store.client.info("clients"))["connected_clients"])
    await installation.configure_store(maxclients=used + 4)
    found = await installation.problem("store.connections")
    assert found.level is not Level.OK and f"of at most {used + 4} connections" in found.line
    assert "CLIENT KILL USER" in found.advice
    for one in taken:
        await one.close()


async def test_missing_and_foreign_functions_are_found(installation: Installation) -> None:
    assert "no function library" in (await installation.problem("store.functions")).line
    await make_layout(installation.store, None, None)
    await installation.findings("indexers.members")
    assert await installation.store.client.function_list() == []  # the doctor changes nothing
    await open_redis_index(installation.store, writer=True)
    assert [one.level for one in await installation.findings("store.functions")] == [Level.OK]
    await installation.store.load_functions(
        "#!lua name=kvatlas\nredis.register_function('kvatlas_old', function() end)"
    )
    (found,) = await installation.findings("store.functions")
    assert found.level is Level.OK and "and kvatlas of other versions" in found.line


async def test_a_missing_layout_and_one_of_another_version_are_found(installation: Installation) -> None:
    assert "no indexer has created a layout" in (await installation.problem("store.layout")).line
    await open_redis_index(installation.store, writer=True)
    await installation.store.client.hset(LAYOUT, "version", "99")
    wrong = await installation.problem("store.layout")
    assert wrong.level is Level.ERROR and "layout version 99" in wrong.line


async def test_a_failed_save_and_a_replica_are_found(installation: Installation, tmp_path: Path) -> None:
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
        found = await examine(installation.nats.url, primary.url, listen_s=0.05)
        assert [one.level for one in found if one.check == "store.persistence"] == [Level.ERROR]
        await store.close()
        await installation.store.client.replicaof(host, port.partition("/")[0])
        (role,) = await installation.findings("store.role")
        assert role.level is Level.ERROR and "is a replica" in role.line


async def test_every_primary_of_a_cluster_is_examined(installation: Installation) -> None:
    with ClusterProcesses() as nodes:
        found = await examine(installation.nats.url, nodes.url, listen_s=0.05)
    policies = [one for one in found if one.check == "store.policy"]
    assert len(policies) == 3 and all(one.level is Level.OK and one.line.startswith("node ") for one in policies)
