"""An embedded Valkey (or Redis) cluster: primaries and their replicas."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from redis.exceptions import RedisError

from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.embedded.server_process import EmbeddedServerError, StartedProcesses
from kvatlas.embedded.valkey import ValkeyProcess

SLOTS = 16_384
_PROBE_INTERVAL_S = 0.01


class ClusterProcesses(StartedProcesses):
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
        if primaries < 3:
            raise EmbeddedServerError(f"a cluster needs at least 3 primaries to agree on a failure, not {primaries}")
        self._start_deadline_s = start_deadline_s
        self._primaries = primaries
        nodes = primaries * (1 + replicas)
        self.nodes = [ValkeyProcess(binary=binary, cluster=True, settings=settings) for _ in range(nodes)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{LOOPBACK}:{self.nodes[0].port}"

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
