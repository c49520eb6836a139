"""A publisher for each engine that Kubernetes lists, in one process, without changes to the engines' pods."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.abc import TaskGroup

from kvatlas.errors import KvatlasError
from kvatlas.runtime.backoff import Backoff
from kvatlas.settings import CollectSettings, NatsSettings, PublishSettings
from kvatlas_cli.discovered_sidecars import discover_sidecars
from kvatlas_cli.output import print_notice

if TYPE_CHECKING:
    from kvatlas_publishers.publisher import Publisher

LIST_S = 2.0
"""Interval at which the pods are listed."""

_log = logging.getLogger("kvatlas.publisher")


class PodLister(Protocol):
    """The part of the Kubernetes API that is used."""

    async def list_objects(self, version: str, plural: str, selector: str = "") -> Sequence[object]:
        """List objects. Raises KvatlasError."""
        ...


@dataclass(slots=True)
class _Followed:
    """A followed pod, with the scope that ends its publishers and the publishers themselves."""

    address: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    publishers: "Sequence[Publisher]" = ()
    draining: bool = False

    def drain(self) -> None:
        """Make routers stop sending it new requests."""
        if not self.draining:
            self.draining = True
            for publisher in self.publishers:
                print_notice(f"worker {publisher.worker_id} drains: its pod ends")
                publisher.drain()


class Collector:
    """Follows the pods with these labels. A worker is named after its pod. A terminating pod is drained, then dropped; a pod
    with a different name or address is a different engine. While Kubernetes does not answer, the known pods stay."""

    def __init__(self, api: PodLister, settings: CollectSettings, state_dir: Path) -> None:
        self._api = api
        self._settings = settings
        self._state_dir = state_dir
        self._servers = {
            name: getattr(settings, name) for name in NatsSettings.model_fields if not name.endswith("_url_file")
        } | {name: getattr(settings, name) for name in ("engine_key_file", "engine_ca_file", "partitions", "fleet_id")}
        self._followed: dict[str, _Followed] = {}
        self._unread = ""

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._look(tasks)
                await anyio.sleep(LIST_S)

    async def _look(self, tasks: TaskGroup) -> None:
        try:
            found = await self._api.list_objects("v1", "pods", self._settings.selector)
        except KvatlasError as error:
            if self._unread != str(error):
                _log.warning("pods could not be listed (%s); following those in the last list", error)
            self._unread = str(error)
            return
        self._unread = ""
        pods = {pod.name: pod for pod in map(read_pod, found) if pod is not None}
        for name in [
            name for name in self._followed if name not in pods or pods[name].address != self._followed[name].address
        ]:
            self._followed.pop(name).scope.cancel()
            print_notice(f"pod {name} is gone")
        for pod in pods.values():
            if pod.ends and pod.name in self._followed:
                self._followed[pod.name].drain()
            elif not pod.ends and pod.name not in self._followed:
                followed = self._followed[pod.name] = _Followed(pod.address)
                tasks.start_soon(self._follow, pod, followed, name=f"kvatlas pod {pod.name}")

    async def _follow(self, pod: "Pod", followed: _Followed) -> None:
        """Publish for one pod until its scope is cancelled, whatever goes wrong with it."""
        from kvatlas_publishers.sidecar import run_sidecar  # needs the extra

        def ready(publishers: "Sequence[Publisher]") -> None:
            backoff.reset()
            followed.publishers = publishers
            for publisher in publishers:
                print_notice(f"worker {publisher.worker_id} is published")

        backoff, said = Backoff(1.0, 30.0), ""
        with followed.scope:
            while True:
                try:
                    await run_sidecar(await self._discover(pod), ready)
                except* KvatlasError as errors:
                    line = str(_first(errors))
                    if line != said:
                        _log.warning("pod %s: %s; trying again", pod.name, line)
                    said = line
                followed.publishers = ()
                await anyio.sleep(backoff.next_s())

    async def _discover(self, pod: "Pod") -> list[PublishSettings]:
        url = f"http://{f'[{pod.address}]' if ':' in pod.address else pod.address}:{self._settings.engine_port}"
        flags = {"engine_url": url, "advertise_url": url, "worker_id": worker_id_of_pod(pod.name)}
        if pod.node:
            flags["locality_domain"] = pod.node
        found = await discover_sidecars(flags, self._servers, self._state_dir, self._settings.engine_access)
        return found


@dataclass(frozen=True, slots=True)
class Pod:
    """`ends`: the pod has been asked to stop."""

    name: str
    address: str
    node: str = ""
    ends: bool = False


def worker_id_of_pod(name: str) -> str:
    """The worker id of a pod, as the collector and the manifests' sidecars name it."""
    return name.replace(".", "_")


def read_pod(found: object) -> Pod | None:
    """A running pod with an address; None for any other pod or object."""
    match found:
        case {"metadata": {"name": str(name), **metadata}, "status": {"podIP": str(address), **status}, **rest} if (
            address
        ):
            if status.get("phase", "Running") != "Running":
                return None
            spec = rest.get("spec")
            node = spec.get("nodeName") if isinstance(spec, Mapping) else None
            return Pod(name, address, node if isinstance(node, str) else "", "deletionTimestamp" in metadata)
    return None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one
