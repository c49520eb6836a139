"""Simulated engines with their index and fleet, and a proxy in front of them over HTTP."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.settings import ProxySettings
from kvatlas.store.connection import Store
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas_router.proxy_service import run_proxy
from tests.http_client import http_client
from tests.simulator.running_engine import running_engine

MODEL = "mock-model"
SCOPE = Scope(MODEL, MODEL)
BLOCK_SIZE = 4
REPORT_S = 0.5
PATIENT_MS = 60_000
"""A deadline for busy machines: a decision without the store would be a different one."""


def record(worker_id: str, url: str, **load: Any) -> FleetRecord:
    endpoint = EngineEndpoint(
        id=worker_id,
        kind=EngineKind.VLLM,
        base_url=url,
        model_id=MODEL,
        tokenizer_id=MODEL,
        block_size=BLOCK_SIZE,
    )
    state = WorkerState(id=worker_id, **load)
    return FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, load=state, incarnation=1)


@dataclass(slots=True)
class Fleet:
    """Engines by worker id, and the store that their proxy reads."""

    store: Store
    index: RedisIndex
    urls: Mapping[str, str]
    clients: Mapping[str, httpx.AsyncClient]
    loaded: dict[str, FleetRecord] = field(default_factory=dict)
    """Records with a load, which is believed only while it keeps being reported."""

    async def holds(self, worker_id: str, tokens: Sequence[int], scope: Scope = SCOPE) -> None:
        """Let the index say that a worker holds a prompt's full blocks."""
        await self.index.put(ScopeUse(scope, BLOCK_SIZE, 1024), worker_id, Tier.HBM, extend_chain(tokens, BLOCK_SIZE))

    async def report(self, worker_id: str, url: str | None = None, **load: Any) -> None:
        """Write a worker's record: its address and its load."""
        written = record(worker_id, url or self.urls[worker_id], **load)
        self.loaded.pop(worker_id, None)
        await FleetStore(self.store).write({worker_id: written})
        if load:
            self.loaded[worker_id] = written

    async def report_loads(self) -> None:
        """Report the loads as publishers do, until cancelled."""
        while True:
            with suppress(*STORE_FAILURES):  # a test may take the store away
                await FleetStore(self.store).write(self.loaded)
            await anyio.sleep(REPORT_S)


@asynccontextmanager
async def running_fleet(
    store: Store, workers: Mapping[str, Mapping[str, Any]], reports: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[Fleet]:
    """An engine for each worker, with changed settings, all reported as up. `reports`: other records, of these or other
    workers, that are reported before a proxy reads them."""
    async with AsyncExitStack() as stack:
        urls: dict[str, str] = {}
        clients: dict[str, httpx.AsyncClient] = {}
        index = await open_redis_index(store, writer=True)
        for worker_id, changed in workers.items():
            addresses, clients[worker_id] = await stack.enter_async_context(running_engine(**changed))
            urls[worker_id] = addresses.base_url
        fleet = Fleet(store, index, urls, clients)
        for worker_id in workers:
            await fleet.report(worker_id)
        for worker_id, report in (reports or {}).items():
            await fleet.report(worker_id, **report)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.report_loads)
            yield fleet
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def running_proxy(redis_url: str, **changed: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy that answers, however busy the machine is."""
    given = {
        "redis_url": redis_url,
        "port": 0,
        "wait": False,
        "decision_deadline_ms": PATIENT_MS,
        "drain_s": 0,
        "grace_s": 1,
        **changed,
    }
    settings = ProxySettings.load(**given)
    urls: list[str] = []
    up = anyio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_proxy, settings, ready)
        with anyio.fail_after(60):
            await up.wait()
        async with http_client(base_url=urls[0], timeout=PATIENT_MS / 1_000) as client:
            yield client
        tasks.cancel_scope.cancel()
