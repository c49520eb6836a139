"""A Valkey cluster whose servers can fail, fail over, and give slots to each other."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import anyio
from anyio.to_thread import run_sync
from redis.crc import key_slot
from redis.exceptions import RedisError

from benchmarks.store_calls import SLOW_LOG
from kvatlas.embedded import EmbeddedServer
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.index.redis.keys import ShardKeys
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.eventually import until
from tests.valkey_cluster import SLOTS, ClusterNode, ClusterProcesses, EmbeddedCluster

PRIMARIES = 3
SETTINGS = {"cluster-require-full-coverage": "no", "repl-diskless-sync-delay": "0", **SLOW_LOG}
"""A shard without a primary does not stop the others."""
KEYS_AT_ONCE = 2
MIGRATE_MS = 5_000
BUS_OFFSET = 10_000


def slot_of_shard(shard: int) -> int:
    slot: int = key_slot(ShardKeys(shard).meta.encode())
    return slot


@dataclass(slots=True)
class StoreCluster:
    """`nodes`: three primaries, followed by a replica of each. Clients reach node i through `lines[i]`, which is the address
    that it announces."""

    nodes: list[EmbeddedServer]
    lines: list[TcpProxy]
    stack: AsyncExitStack
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(SETTINGS))

    @property
    def url(self) -> str:
        """The URL with all nodes."""
        return ",".join(f"redis+cluster://{LOOPBACK}:{line.port}" for line in self.lines)

    async def command(self, node: EmbeddedServer, *parts: str | int | bytes) -> Any:
        """Run a command there. Raises RedisError."""
        process = node.process
        assert isinstance(process, ValkeyProcess)
        return await run_sync(lambda: process.command(*parts))

    async def primary_of(self, slot: int) -> EmbeddedServer | None:
        """The running primary that has the slot, by its own view."""
        for node in self.nodes:
            if node.is_running and slot in await self._slots(node):
                return node
        return None

    async def primaries(self) -> list[EmbeddedServer]:
        """The running primaries that have slots."""
        return [node for node in self.nodes if node.is_running and await self._slots(node)]

    async def replica_of(self, primary: EmbeddedServer) -> EmbeddedServer:
        """A replica of this primary that is up to date."""
        primary_id = await self.id_of(primary)

        async def found() -> EmbeddedServer | None:
            for node in self.nodes:
                with suppress(RedisError):
                    myself, replication = await self._myself(node), await self.command(node, "INFO", "replication")
                    if myself["master_id"] == primary_id and replication["master_link_status"] == "up":
                        return node
            return None

        replica = await until(found, what="the primary has a replica")
        assert replica is not None
        return replica

    async def id_of(self, node: EmbeddedServer) -> str:
        found: bytes | str = await self.command(node, "CLUSTER MYID")
        return found.decode() if isinstance(found, bytes) else found

    async def fail_over(self, replica: EmbeddedServer) -> None:
        """Make it the primary, in agreement with the current one."""
        await self.command(replica, "CLUSTER FAILOVER")

        async def is_primary() -> bool:
            return bool((await self.command(replica, "ROLE"))[0] == b"master")

        await until(is_primary, what="the replica is the primary")

    async def move_slots(self, source: EmbeddedServer, first: int, last: int, target: EmbeddedServer) -> None:
        """Move the slots in one step, as Valkey 9 does: everything is copied, then the owner changes."""
        await self.command(source, "CLUSTER MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", await self.id_of(target))

        async def is_moved() -> bool:
            (newest, *_) = await self.command(source, "CLUSTER GETSLOTMIGRATIONS")
            assert newest[b"state"] not in (b"failed", b"cancelled"), newest
            return bool(newest[b"state"] == b"success")

        await until(is_moved, what=f"slots {first} to {last} are moved")

    async def move_slot_by_keys(
        self, source: EmbeddedServer, slot: int, target: EmbeddedServer, pause_s: float
    ) -> None:
        """Move the slot as every version does: key by key, while both servers refuse calls that name keys of both. `pause_s`:
        the pause after every few keys."""
        await self.command(target, "CLUSTER SETSLOT", slot, "IMPORTING", await self.id_of(source))
        await self.command(source, "CLUSTER SETSLOT", slot, "MIGRATING", await self.id_of(target))
        await self._move_keys(source, slot, target, pause_s)
        for node in (target, source):
            await self.command(node, "CLUSTER SETSLOT", slot, "NODE", await self.id_of(target))

    async def add_primary(self) -> EmbeddedServer:
        """Add a server without slots."""
        node = await self.stack.enter_async_context(EmbeddedServer(ClusterNode(settings=self.settings)))
        await self._put_line_before(node)
        await self.command(node, "CLUSTER MEET", LOOPBACK, self.nodes[0].port, self.nodes[0].port + BUS_OFFSET)
        self.nodes.append(node)
        await self.wait_until_whole()
        return node

    async def remove(self, node: EmbeddedServer) -> None:
        """Remove a server without slots, and stop it."""
        index, node_id = self.nodes.index(node), await self.id_of(node)
        del self.nodes[index], self.lines[index]
        for other in self.nodes:
            await self.command(other, "CLUSTER FORGET", node_id)
        await node.stop()
        await self.wait_until_whole()

    async def repair(self, slots: Iterable[int]) -> None:
        """Wait until it is whole, and bring these slots' keys back to their primaries if a move was broken off, as
        `--cluster fix` does."""
        await self.wait_until_whole()
        for slot in slots:
            owner = await self.primary_of(slot)
            assert owner is not None
            for node in await self.primaries():
                if node is owner:
                    continue
                await self.command(node, "CLUSTER SETSLOT", slot, "IMPORTING", await self.id_of(owner))
                await self._move_keys(node, slot, owner, 0)
                await self.command(node, "CLUSTER SETSLOT", slot, "STABLE")
            await self.command(owner, "CLUSTER SETSLOT", slot, "STABLE")

    async def wait_until_whole(self) -> None:
        """Wait until each running server sees all slots served and announces its line, and each replica is up to date."""
        for node, line in zip(self.nodes, self.lines, strict=True):
            await self.command(node, "CONFIG SET", "cluster-announce-port", line.port)

        async def is_whole() -> bool:
            covered: set[int] = set()
            for node in self.nodes:
                try:
                    info = await self.command(node, "CLUSTER INFO")
                    replication = await self.command(node, "INFO", "replication")
                    covered |= await self._slots(node)
                except RedisError:
                    return False
                if (info["cluster_state"], int(info["cluster_slots_ok"])) != ("ok", SLOTS):
                    return False
                if replication.get("master_link_status", "up") != "up":
                    return False
            return len(covered) == SLOTS

        await until(is_whole, deadline_s=60, what="the cluster is whole")

    async def _move_keys(self, source: EmbeddedServer, slot: int, target: EmbeddedServer, pause_s: float) -> None:
        while keys := await self.command(source, "CLUSTER GETKEYSINSLOT", slot, KEYS_AT_ONCE):
            await self.command(source, "MIGRATE", LOOPBACK, target.port, "", 0, MIGRATE_MS, "REPLACE", "KEYS", *keys)
            await anyio.sleep(pause_s)  # slow enough for calls to meet keys on both sides

    async def _put_line_before(self, node: EmbeddedServer) -> None:
        line = await self.stack.enter_async_context(TcpProxy(node.port, f"all to Valkey {len(self.lines)}"))
        await self.command(node, "CONFIG SET", "cluster-announce-bus-port", node.port + BUS_OFFSET)
        await self.command(node, "CONFIG SET", "cluster-announce-port", line.port)
        self.lines.append(line)

    async def _myself(self, node: EmbeddedServer) -> Mapping[str, Any]:
        found = await self.command(node, "CLUSTER NODES")
        return next(one for one in found.values() if "myself" in one["flags"])

    async def _slots(self, node: EmbeddedServer) -> set[int]:
        try:
            ranges = (await self._myself(node))["slots"]
        except RedisError:
            return set()
        return {slot for first, *last in ranges for slot in range(int(first), int(last[0] if last else first) + 1)}


@asynccontextmanager
async def store_cluster() -> AsyncIterator[StoreCluster]:
    """Three primaries with a replica each; nothing is kept on disk, as in production."""
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(
            EmbeddedCluster(ClusterProcesses(primaries=PRIMARIES, replicas=1, settings=SETTINGS))
        )
        cluster = StoreCluster(list(servers.nodes), [], stack)
        for node in servers.nodes:
            await cluster._put_line_before(node)
        await cluster.wait_until_whole()
        yield cluster
