"""The demo's fleet: every part is its own process, as in production; all of them end with the demo."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
from anyio.abc import Process

from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.child_process import child_command
from kvatlas.embedded.free_port import LOOPBACK, free_port
from kvatlas.errors import KvatlasError
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store

START_S = 40.0
STOP_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`engine_flags`: flags of every simulated engine; `flags_of_each`: additional ones for each; `sidecar_flags`: flags of
    every publisher; `routers`: the flags of each router, by name."""

    model: str
    engines: int
    indexers: int
    engine_flags: Sequence[str]
    routers: Mapping[str, Sequence[str]]
    flags_of_each: Sequence[Sequence[str]] = ()
    sidecar_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """The URLs of the engines by worker id, of the routers by name, and of the indexers' status pages."""

    nats_url: str
    redis_url: str
    engines: dict[str, str]
    routers: dict[str, str]
    status_urls: Sequence[str]


@asynccontextmanager
async def running_fleet(settings: FleetSettings, folder: Path) -> AsyncIterator[RunningFleet]:
    """Run embedded NATS and Valkey, indexers, engines with a sidecar each, and routers. The context is entered once all of
    them answer.

    Raises KvatlasError, with the last line of the part's log, if a part does not start.
    """
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server())
        valkey = await stack.enter_async_context(valkey_server())
        bus = ["--nats-url", nats.url, "--log-level", "warning"]
        servers = [*bus, "--redis-url", valkey.url]
        parts: list[_Part] = []
        status_urls, engines, routers = [], {}, {}
        for i in range(settings.indexers):
            port = free_port()
            status_urls.append(f"http://{LOOPBACK}:{port}")
            args = ["indexer", *servers, "--member-id", f"indexer-{i}", "--status-port", str(port)]
            parts.append(_Part(f"indexer-{i}", args, f"{status_urls[-1]}/readyz", folder))
        for i in range(settings.engines):
            worker_id = f"engine-{i}"
            http, events, replay = free_port(), free_port(), free_port()
            engines[worker_id] = f"http://{LOOPBACK}:{http}"
            sockets = [f"tcp://{LOOPBACK}:{events}", f"tcp://{LOOPBACK}:{replay}"]
            args = ["simulate-engine", "--model", settings.model, "--port", str(http), *settings.engine_flags]
            args += ["--endpoint", sockets[0], "--replay-endpoint", sockets[1]]
            args += settings.flags_of_each[i] if settings.flags_of_each else ()
            parts.append(_Part(worker_id, args, f"{engines[worker_id]}/health", folder))
            args = ["publish", *bus, "--engine", "vllm", "--worker-id", worker_id, "--model-id", settings.model]
            args += ["--endpoint", sockets[0], "--replay-endpoint", sockets[1], "--engine-url", engines[worker_id]]
            args += settings.sidecar_flags
            parts.append(_Part(f"{worker_id}-sidecar", args, None, folder))
        for name, flags in settings.routers.items():
            port = free_port()
            routers[name] = f"http://{LOOPBACK}:{port}"
            args = ["router", *servers, "--port", str(port), "--drain-s", "0", *flags]
            parts.append(_Part(f"router-{name}", args, f"{routers[name]}/health", folder))
        for part in parts:
            await stack.enter_async_context(part.running())
        async with httpx.AsyncClient() as client:
            for part in parts:
                await part.wait_until_ready(client)
        yield RunningFleet(nats.url, valkey.url, engines, routers, status_urls)


async def wait_until_routable(store: Store, workers: int, within_s: float) -> None:
    """Wait until the indexers have made this many workers routable. Raises KvatlasError."""
    with anyio.move_on_after(within_s):
        while sum(record.routable for record in (await FleetStore(store).all()).values()) < workers:
            await anyio.sleep(_POLL_S)
        return
    raise KvatlasError(f"fewer than {workers} workers became routable in {within_s:g} s")


class _Part:
    """One `kvatlas` command as a child process that writes its output to a log file."""

    def __init__(self, name: str, args: Sequence[str], probe_url: str | None, folder: Path) -> None:
        self._name = name
        self._args = args
        self._probe_url = probe_url
        self._log = folder / f"{name}.log"
        self._process: Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        command = child_command([sys.executable, "-m", "kvatlas_cli.main", *self._args])
        with self._log.open("wb") as log:
            # in its own session, so that Ctrl-C reaches only the demo, which then stops every part in order
            self._process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop(self._process)

    async def wait_until_ready(self, client: httpx.AsyncClient) -> None:
        """Wait until the part answers its probe. Raises KvatlasError."""
        assert self._process is not None
        with anyio.move_on_after(START_S):
            while True:
                if self._process.returncode is not None:
                    raise KvatlasError(f"{self._name} exited: {self._last_line()}")
                if self._probe_url is None:
                    return
                try:
                    if (await client.get(self._probe_url, timeout=2)).is_success:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                await anyio.sleep(_POLL_S)
        raise KvatlasError(f"{self._name} did not answer in {START_S:g} s: {self._last_line()}")

    async def _stop(self, process: Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_S):
            await process.wait()
            return
        process.kill()
        await process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"
