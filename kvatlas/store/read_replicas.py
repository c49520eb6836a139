"""Reads from a cluster's replicas, as long as these hear from their primaries."""

import logging
import random
from collections.abc import Callable
from time import monotonic
from typing import Any

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisError

from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.redis_connections import RedisConnections

HEARD_S = 2
"""A replica that has not heard from its primary for longer than this may be behind, and is not used."""
CHECK_EVERY_S = 1.0

log = logging.getLogger("kvatlas.store")


class ReadReplicas:
    """Picks one replica of each shard, a different one in each process. Its answers may be HEARD_S + CHECK_EVERY_S old."""

    def __init__(self, client: RedisCluster, connections_to: Callable[[ClusterNode], RedisConnections]) -> None:
        """`connections_to`: a function that returns connections on which a replica may be read from."""
        self._client = client
        self._connections_to = connections_to
        self._choice = random.SystemRandom().random()
        self._checked: dict[str, tuple[float, bool]] = {}
        """For each node: when it was checked, and whether it may be read from."""
        self._log = RateLimitedLog(log)

    async def call(self, command: tuple[Any, ...]) -> tuple[Any] | None:
        """The answer of a replica to a read-only function call; None if the primary must be asked."""
        node = self._replica_of(command[3])
        if node is None:
            return None
        try:
            connections = self._connections_to(node)
            if not await self._is_current(node.name, connections):
                return None
            return ((await connections.call([command], retry=True))[0],)
        except (RedisError, OSError, TimeoutError) as error:
            self._checked[node.name] = monotonic(), False
            self._log.report(node.name, f"replica {node.name} is not used ({error}), asking its primary")
            return None

    def _replica_of(self, key: str | bytes) -> ClusterNode | None:
        nodes = self._client.nodes_manager.slots_cache.get(self._client.keyslot(key), [])
        return nodes[1 + int(self._choice * (len(nodes) - 1))] if len(nodes) > 1 else None

    async def _is_current(self, name: str, connections: RedisConnections) -> bool:
        checked_s, current = self._checked.get(name, (0.0, False))
        if monotonic() < checked_s + CHECK_EVERY_S:
            return current
        self._checked[name] = monotonic(), current  # for calls that arrive in the meantime
        (text,) = await connections.call([("INFO", "replication")], retry=True)
        info = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        heard = info.get("master_link_status") == "up" and int(info["master_last_io_seconds_ago"]) <= HEARD_S
        self._checked[name] = monotonic(), heard or info["role"] == "master"
        return self._checked[name][1]
