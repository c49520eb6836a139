"""The endpoints of a pool's pods, found by looking up names or taken from an InferencePool in Kubernetes."""

import asyncio
import logging
import socket
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Protocol

from pydantic import BaseModel, Field

from kvatlas.addresses import parse_ip
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas_router.gateway.kubernetes_api import KubernetesApi, PeriodicRead, parse_objects
from kvatlas_router.gateway.worker_addresses import join_endpoint

LOOKUP_S = 5.0
"""Interval at which pod names are looked up again."""
POOL_VERSION = "inference.networking.k8s.io/v1"
ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"
"""A pod's annotation that lists the pool's ports that the pod serves on. The extension's own picker reads it too."""

_log = logging.getLogger("kvatlas_router.gateway")


class PoolPods(Protocol):
    """A pool's endpoints, kept up to date from `start` to `stop`."""

    @property
    def endpoints(self) -> Collection[str] | None:
        """A new object after each change. None: the pool includes all workers."""
        ...

    @property
    def is_known(self) -> bool:
        """True once requests can be routed by this list."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class PodList:
    """The endpoints of a pool's pods, from `host:port` entries. A name, such as a headless Service's, stands for all of its
    addresses and is looked up again every LOOKUP_S. If that fails, its last addresses stay in use."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises InvalidValue for an entry that is not host:port."""
        self._entries = [_split_entry(entry) for entry in entries]
        self._found: dict[str, Sequence[str]] = {}
        self._task = BackgroundTask(self._run, "kvatlas gateway pods")
        self.endpoints: Collection[str] | None = None
        """None: no pods are listed, or none was found yet."""

    @property
    def is_known(self) -> bool:
        """See `PoolPods`. Always true: requests are not refused because a name does not resolve yet."""
        return True

    async def start(self) -> None:
        """Look up each name once, then periodically."""
        await self._look_up()
        if self._entries:
            self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(LOOKUP_S)
            await self._look_up()

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        for host, port in self._entries:
            name = f"{host}:{port}"
            try:
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                kept = len(self._found.get(name, ()))
                _log.warning("pods at %s: %s; using the last %d known", name, error.strerror or error, kept)
                continue
            self._found[name] = sorted({join_endpoint(str(info[4][0]), port) for info in infos})
        found = [endpoint for endpoints in self._found.values() for endpoint in endpoints]
        if found != self.endpoints:
            self.endpoints = found or None


def _split_entry(entry: str) -> tuple[str, int]:
    host, _, port = entry.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise InvalidValue(f"pods has {entry!r:.80}; expected HOST:PORT")
    return host.strip("[]"), int(port)


class _Selector(BaseModel):
    matchLabels: Annotated[dict[str, str], Field(min_length=1)]  # noqa: N815 - Kubernetes' name


class _Port(BaseModel):
    number: Annotated[int, Field(ge=1, le=65_535)]


class _PoolSpec(BaseModel):
    selector: _Selector
    targetPorts: Annotated[list[_Port], Field(min_length=1)]  # noqa: N815


class _Pool(BaseModel):
    spec: _PoolSpec


class _Metadata(BaseModel):
    annotations: dict[str, str] = {}
    deletionTimestamp: str | None = None  # noqa: N815


class _Condition(BaseModel):
    type: str
    status: str


class _Status(BaseModel):
    podIP: str = ""  # noqa: N815
    conditions: list[_Condition] = []


class _Pod(BaseModel):
    metadata: _Metadata
    status: _Status = _Status()

    @property
    def is_ready(self) -> bool:
        ready = any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)
        return ready and self.metadata.deletionTimestamp is None and parse_ip(self.status.podIP) is not None


class KubernetesPool(PeriodicRead):
    """The ready pods that an InferencePool selects, at the target ports that they serve on. See `PoolPods`."""

    def __init__(self, api: KubernetesApi, name: str) -> None:
        """`name`: an InferencePool in the pod's own namespace."""
        super().__init__(f"pool {name}")
        self._api = api
        self._name = name
        self.endpoints: Collection[str] = ()
        self.is_known = False

    async def _read(self) -> Sequence[str]:
        wrong: list[str] = []
        given = await self._api.get_object(POOL_VERSION, "inferencepools", self._name)
        pools = parse_objects("InferencePool", _Pool, [given], wrong)
        if not pools:
            raise KvatlasError(wrong[0])
        spec = pools[0].spec
        selector = ",".join(f"{key}={value}" for key, value in spec.selector.matchLabels.items())
        pods = parse_objects("Pod", _Pod, await self._api.list_objects("v1", "pods", selector), wrong)
        found = sorted(
            join_endpoint(pod.status.podIP, port.number)
            for pod in pods
            if pod.is_ready
            for port in spec.targetPorts
            if _serves(pod, port.number)
        )
        if found != self.endpoints:
            self.endpoints = found
        self.is_known = True
        return wrong


def _serves(pod: _Pod, port: int) -> bool:
    active = pod.metadata.annotations.get(ACTIVE_PORTS)
    return active is None or str(port) in (part.strip() for part in active.split(","))
