"""The embedded servers for asyncio: the same processes, without blocking the event loop."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ParamSpec, Self

import anyio
from anyio.from_thread import check_cancelled
from anyio.to_thread import run_sync

from kvatlas.embedded.cluster import ClusterProcesses
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.server_process import ServerProcess, StartedProcesses
from kvatlas.embedded.valkey import ValkeyProcess

P = ParamSpec("P")


class _EmbeddedProcesses:
    """Processes as an async context manager: started on entry, gone on exit, also on cancellation."""

    def __init__(self, processes: StartedProcesses) -> None:
        self._processes = processes

    @property
    def url(self) -> str:
        """The address for clients; see StartedProcesses."""
        return self._processes.url

    async def start(self) -> None:
        """Return when all processes answer."""
        await run_sync(partial(self._processes.start, while_waiting=check_cancelled))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await run_sync(self._processes.close)


class EmbeddedServer(_EmbeddedProcesses):
    """A server process as an async context manager.

    `start`, `stop`, `kill`, `restart` return when the server answers or is gone. ServerProcess documents each of them.
    """

    def __init__(self, process: ServerProcess) -> None:
        super().__init__(process)
        self.process = process

    @property
    def port(self) -> int:
        return self.process.port

    @property
    def pid(self) -> int:
        """The process id. Raises EmbeddedServerError when it is not running."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.is_running

    async def stop(self) -> None:
        await run_sync(self.process.stop)

    async def kill(self) -> None:
        await run_sync(self.process.kill)

    async def restart(self) -> None:
        await run_sync(partial(self.process.restart, while_waiting=check_cancelled))

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()


class EmbeddedCluster(_EmbeddedProcesses):
    """A cluster as an async context manager; each of `nodes` can be killed and restarted."""

    def __init__(self, processes: ClusterProcesses) -> None:
        super().__init__(processes)
        self.nodes = [EmbeddedServer(node) for node in processes.nodes]


def _on_asyncio(process: Callable[P, ServerProcess]) -> Callable[P, EmbeddedServer]:
    """A constructor with the parameters of `process`, for asyncio."""

    def construct(*args: P.args, **kwargs: P.kwargs) -> EmbeddedServer:
        return EmbeddedServer(process(*args, **kwargs))

    return construct


nats_server = _on_asyncio(NatsProcess)
"""A NATS server with JetStream; parameters as in NatsProcess. Raises EmbeddedServerError if its program is not found."""

valkey_server = _on_asyncio(ValkeyProcess)
"""A Valkey server; parameters as in ValkeyProcess. Raises EmbeddedServerError if its program is not found."""


def valkey_cluster(
    *,
    primaries: int = 3,
    replicas: int = 0,
    binary: Path | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> EmbeddedCluster:
    """A cluster of Valkey servers, each primary with `replicas` replicas. Raises EmbeddedServerError if its program is not
    found."""
    return EmbeddedCluster(ClusterProcesses(primaries=primaries, replicas=replicas, binary=binary, settings=settings))
