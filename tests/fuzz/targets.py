"""The fuzzed processes: a small fleet, whose workers must stay exact, and a hostile engine with a sidecar."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvatlas.embedded.free_port import free_port
from tests.chaos.child_process import ChildProcess
from tests.chaos.fleet import MODEL, PARTITIONS, Fleet, running_fleet
from tests.chaos.proxy import LOOPBACK
from tests.publishers.engines.engine_http import EngineHttp, engine_http
from tests.publishers.fake_engine import FakeEngine

ENGINES = 2
HOSTILE = "hostile"
"""The worker of the hostile engine."""


@dataclass(slots=True)
class Targets:
    """The running processes. `urls`: base URLs of the router and of the status pages."""

    fleet: Fleet
    engine: FakeEngine
    pages: EngineHttp
    sidecar: ChildProcess
    router: ChildProcess
    urls: Sequence[str]

    @property
    def children(self) -> list[ChildProcess]:
        return [*self.fleet.children, self.sidecar, self.router]

    def ended(self) -> list[str]:
        """The processes that should be running but are not, with the end of their logs."""
        return [f"{one.name}: {one.log_text()[-1500:]}" for one in self.children if not one.is_running]

    def tracebacks(self) -> list[str]:
        """The first traceback in each process's log."""
        found = []
        for one in self.children:
            text = one.log_text()
            if (at := text.find("Traceback (most recent call last)")) >= 0:
                found.append(f"{one.name}: {text[at : at + 3_000]}")
        return found


@asynccontextmanager
async def running_targets(folder: Path, seed: int) -> AsyncIterator[Targets]:
    async with AsyncExitStack() as stack:
        status = [free_port() for _ in range(2)]
        arguments = ["--retire-after-s", "3600", "--status-port", str(status[0])]
        fleet = await stack.enter_async_context(
            running_fleet(folder, engines=ENGINES, indexers=1, seed=seed, indexer_arguments=arguments)
        )
        engine = await stack.enter_async_context(FakeEngine())
        pages = stack.enter_context(engine_http())
        pages.pages = {"/health": (200, ""), "/metrics": (200, "")}
        bus, redis = fleet.nats_server.url, fleet.valkey.url
        publish = ["publish", "--engine", "vllm", "--worker-id", HOSTILE, "--model-id", MODEL, "--nats-url", bus]
        publish += [
            "--endpoint",
            engine.endpoint,
            "--replay-endpoint",
            engine.replay_endpoint,
            "--engine-url",
            pages.url,
        ]
        publish += ["--partitions", str(PARTITIONS), "--status-port", str(status[1]), "--distrust-poison"]
        publish += ["--state-dir", str(folder / "hostile-state")]
        port = free_port()
        router = ["router", "--redis-url", redis, "--port", str(port), "--decision-deadline-ms", "1000"]
        sidecar = ChildProcess("hostile-sidecar", publish, "is published", folder)
        proxy = ChildProcess("router", router, "router at", folder)
        for child in (sidecar, proxy):
            stack.callback(child.close)
            child.start()
        for child in (sidecar, proxy):
            await child.ready()
        await engine.subscribed()
        urls = [f"http://{LOOPBACK}:{one}" for one in (port, *status)]
        yield Targets(fleet, engine, pages, sidecar, proxy, urls)
