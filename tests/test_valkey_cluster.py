from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.eventually import until
from tests.kvatlas.embedded.process_table import is_alive, listening_ports
from tests.valkey_cluster import ClusterProcesses, EmbeddedCluster

pytestmark = pytest.mark.anyio


async def cluster_info(url: str) -> dict[str, str]:
    client: Any = redis.asyncio.Redis.from_url(url)
    async with client:
        info: dict[str, str] = await client.execute_command("CLUSTER INFO")
        return info


@pytest.mark.parametrize("kind", ["valkey", "redis8"])
async def test_three_primaries_share_all_slots(kind: str, redis8_binary: Path) -> None:
    async with EmbeddedCluster(ClusterProcesses(binary=redis8_binary if kind == "redis8" else None)) as cluster:
        pids = [node.pid for node in cluster.nodes]
        for node in cluster.nodes:
            info = await cluster_info(node.url)
            assert info["cluster_state"] == "ok"
            assert info["cluster_slots_ok"] == "16384"
            assert info["cluster_size"] == "3"
            assert listening_ports(node.pid) == {node.port: True, node.port + 10_000: True}
        assert cluster.url == f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}"
        members: Any = redis.asyncio.RedisCluster.from_url(cluster.nodes[0].url)
        async with members as client:
            for key in range(32):
                await client.set(f"k{key}", key)
            sizes = [await client.dbsize(target_nodes=node) for node in client.get_primaries()]
        assert sum(sizes) == 32
        assert all(sizes)

        await cluster.nodes[1].restart()

        async def is_whole() -> bool:
            return (await cluster_info(cluster.nodes[1].url))["cluster_state"] == "ok"

        await until(is_whole, what="a restarted node rejoins the cluster")
    assert not any(is_alive(pid) for pid in pids)
