"""Random faults of clusters, in addition to those that any fleet may have."""

import random
from collections.abc import Awaitable, Callable

from anyio.to_thread import run_sync
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.embedded import EmbeddedServer
from tests.chaos.clusters.nats_cluster import remove_files, step_down
from tests.chaos.clusters.store_cluster import StoreCluster, slot_of_shard
from tests.chaos.clusters.store_scenarios import cluster_of
from tests.chaos.fleet import SHARDS, Fleet
from tests.chaos.random_faults import FAULTS, Fault, kill_nats, kill_redis

KEY_PAUSE_S = 0.02

Move = Callable[[StoreCluster, EmbeddedServer, int, EmbeddedServer], Awaitable[None]]
"""Moves a slot from the first server to the second."""


async def kill_nats_server(fleet: Fleet, rng: random.Random) -> str:
    """One at a time: the others continue. Sometimes it comes back without its files."""
    running = [server for server in fleet.nats_servers if server.is_running]
    if len(running) < len(fleet.nats_servers):
        return ""
    server = rng.choice(running)
    await server.kill()
    number = fleet.nats_servers.index(server)
    if rng.random() < 0.3:
        await run_sync(remove_files, server)
        return f"NATS server {number} SIGKILL, its files removed"
    return f"NATS server {number} SIGKILL"


async def kill_all_nats_servers(fleet: Fleet, rng: random.Random) -> str:
    for server in fleet.nats_servers:
        await server.kill()
    return "all NATS servers SIGKILL"


async def change_leader(fleet: Fleet, rng: random.Random) -> str:
    try:
        await step_down(fleet.nats_client)
    except NatsError:
        return ""
    return "the stream's leader steps down"


async def kill_store_server(fleet: Fleet, rng: random.Random) -> str:
    server = rng.choice(cluster_of(fleet).nodes)
    if not server.is_running:
        return ""
    await server.kill()
    return f"Valkey server {cluster_of(fleet).nodes.index(server)} SIGKILL"


async def change_primary(fleet: Fleet, rng: random.Random) -> str:
    """A replica takes over, sometimes without asking the primary."""
    cluster = cluster_of(fleet)
    replica = rng.choice(cluster.nodes)
    how = rng.choice((("CLUSTER FAILOVER",), ("CLUSTER FAILOVER", "FORCE"), ("CLUSTER FAILOVER", "TAKEOVER")))
    try:
        await cluster.command(replica, *how)
    except (RedisError, OSError):
        return ""
    return f"{' '.join(how)} at Valkey server {cluster.nodes.index(replica)}"


async def move_slot_in_one_step(fleet: Fleet, rng: random.Random) -> str:
    async def move(cluster: StoreCluster, source: EmbeddedServer, slot: int, target: EmbeddedServer) -> None:
        await cluster.move_slots(source, slot, slot, target)

    return await _move(fleet, rng, "in one step", move)


async def move_slot_key_by_key(fleet: Fleet, rng: random.Random) -> str:
    async def move(cluster: StoreCluster, source: EmbeddedServer, slot: int, target: EmbeddedServer) -> None:
        await cluster.move_slot_by_keys(source, slot, target, KEY_PAUSE_S)

    return await _move(fleet, rng, "key by key", move)


async def _move(fleet: Fleet, rng: random.Random, how: str, move: Move) -> str:
    """Move a shard's slot to another primary. Returns empty text if either server is not well."""
    cluster, shard = cluster_of(fleet), rng.randrange(SHARDS)
    slot = slot_of_shard(shard)
    source = await cluster.primary_of(slot)
    targets = [node for node in await cluster.primaries() if node is not source]
    if source is None or not targets:
        return ""
    target = rng.choice(targets)
    try:
        await move(cluster, source, slot, target)
    except (RedisError, OSError, AssertionError):
        return f"shard {shard} moved {how}, not to its end"
    return f"shard {shard} moved {how} to Valkey server {cluster.nodes.index(target)}"


CLUSTER_FAULTS: dict[Fault, float] = {
    **{fault: often for fault, often in FAULTS.items() if fault not in (kill_nats, kill_redis)},
    kill_nats_server: 2,
    kill_all_nats_servers: 0.3,
    change_leader: 1,
    kill_store_server: 2,
    change_primary: 1.5,
    move_slot_in_one_step: 1,
    move_slot_key_by_key: 1,
}
"""Relative frequency of each."""
