"""An embedded Valkey (or Redis) cluster of primaries."""

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
    """`primaries` servers that share the slots of a cluster evenly. Blocking; for parameters see ValkeyProcess."""

    def __init__(
        self,
        *,
        primaries: int = 3,
        binary: Path | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        start_deadline_s: float = 20.0,
    ) -> None:
        if primaries < 3:
            raise EmbeddedServerError(f"a cluster needs at least 3 primaries to agree on a failure, not {primaries}")
        self._start_deadline_s = start_deadline_s
        self.nodes = [ValkeyProcess(binary=binary, cluster=True, settings=settings) for _ in range(primaries)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{LOOPBACK}:{self.nodes[0].port}"

    def start(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Start the nodes, assign the slots, and wait until every node sees the whole cluster. See ServerProcess.start.

        Raises EmbeddedServerError if a node fails to start or the nodes don't agree in time.
        """
        for node in self.nodes:
            node.start(while_waiting=while_waiting)
        for index, node in enumerate(self.nodes):
            first, end = (SLOTS * i // len(self.nodes) for i in (index, index + 1))
            node.command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            node.command("CLUSTER SET-CONFIG-EPOCH", index + 1)
            if index > 0:
                node.command("CLUSTER MEET", LOOPBACK, self.nodes[0].port)
        deadline = time.monotonic() + self._start_deadline_s
        while not all(self._sees_all(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"the cluster at {self.url} did not form within {self._start_deadline_s:g} s")
            while_waiting()
            time.sleep(_PROBE_INTERVAL_S)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _sees_all(self, node: ValkeyProcess) -> bool:
        try:
            info, shards = node.command("CLUSTER INFO"), node.command("CLUSTER SHARDS")
        except RedisError:
            return False
        return bool(info["cluster_state"] == "ok" and len(shards) == len(self.nodes))
