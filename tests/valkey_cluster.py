"""A Valkey (or Redis) cluster on loopback: primaries and their replicas."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import anyio
from anyio.from_thread import check_cancelled
from anyio.to_thread import run_sync
from redis.exceptions import RedisError

from kvatlas.embedded import EmbeddedServer, EmbeddedServerError
from kvatlas.embedded.free_port import LOOPBACK, free_port, is_free
from kvatlas.embedded.valkey import ValkeyProcess

BUS_OFFSET = 10_000
"""A node's port for other nodes is this far above the one for clients."""
SLOTS = 16_384
_PROBE_INTERVAL_S = 0.01


class ClusterNode(ValkeyProcess):
    """A server that can join a cluster; for parameters see ValkeyProcess."""

    def __init__(self, *, binary: Path | None = None, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        clustered = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
        super().__init__(binary=binary, settings=clustered | dict(settings))

    def _choose_port(self) -> int:
        while not is_free((port := free_port()) + BUS_OFFSET):
            pass
        return port


class ClusterProcesses:
    """`primaries` servers that share the slots of a cluster evenly, each with `replicas` replicas. In `nodes` the replicas
    follow, in the order of their primaries. Blocking; for parameters see ValkeyProcess."""

    def __init__(
        self,
        *,
        primaries: int = 3,
        replicas: int = 0,
        binary: Path | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        start_deadline_s: float = 20.0,
    ) -> None:
        self._start_deadline_s = start_deadline_s
        self._primaries = primaries
        nodes = primaries * (1 + replicas)
        self.nodes: list[ValkeyProcess] = [ClusterNode(binary=binary, settings=settings) for _ in range(nodes)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{LOOPBACK}:{self.nodes[0].port}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Start the nodes, assign the slots, and wait until every node sees the whole cluster. See ServerProcess.start.

        Raises EmbeddedServerError if a node fails to start or the nodes don't agree in time.
        """
        for node in self.nodes:
            node.start(while_waiting=while_waiting)
        primaries = self.nodes[: self._primaries]
        for index, node in enumerate(primaries):
            first, end = (SLOTS * i // len(primaries) for i in (index, index + 1))
            node.command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        for index, node in enumerate(self.nodes):
            node.command("CLUSTER SET-CONFIG-EPOCH", index + 1)
            if index > 0:
                node.command("CLUSTER MEET", LOOPBACK, self.nodes[0].port)
        self._wait_until("form", self._sees_primaries, while_waiting)
        for index, node in enumerate(self.nodes[self._primaries :]):
            node.command("CLUSTER REPLICATE", primaries[index % len(primaries)].command("CLUSTER MYID"))
        self._wait_until("bring its replicas up to date", self._sees_replicas, while_waiting)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _wait_until(
        self, what: str, is_done: Callable[[ValkeyProcess], bool], while_waiting: Callable[[], object]
    ) -> None:
        """Wait until every node is done. Raises EmbeddedServerError at the deadline."""
        deadline = time.monotonic() + self._start_deadline_s
        while not all(is_done(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the cluster at {self.url} did not {what} within {self._start_deadline_s:g} s"
                )
            while_waiting()
            time.sleep(_PROBE_INTERVAL_S)

    def _sees_primaries(self, node: ValkeyProcess) -> bool:
        try:
            info = node.command("CLUSTER INFO")
        except RedisError:
            return False
        whole = info["cluster_state"] == "ok" and int(info["cluster_size"]) == self._primaries
        return whole and int(info["cluster_known_nodes"]) == len(self.nodes)

    def _sees_replicas(self, node: ValkeyProcess) -> bool:
        try:
            info, shards = node.command("INFO", "replication"), node.command("CLUSTER SHARDS")
        except RedisError:
            return False
        return len(shards) == self._primaries and info.get("master_link_status", "up") == "up"


class EmbeddedCluster:
    """The same as an async context manager; each of `nodes` can be killed and restarted."""

    def __init__(self, processes: ClusterProcesses) -> None:
        self._processes = processes
        self.url = ""
        self.nodes = [EmbeddedServer(node) for node in processes.nodes]

    async def __aenter__(self) -> Self:
        try:
            await run_sync(partial(self._processes.start, while_waiting=check_cancelled))
        except BaseException:
            await self.__aexit__()
            raise
        self.url = self._processes.url
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await run_sync(self._processes.close)
