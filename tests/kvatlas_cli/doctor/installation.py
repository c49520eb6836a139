"""A whole small installation: servers of its own, a replica, simulated engines with their publishers."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import alive_subject
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Heartbeat, Liveness, WorkerState
from kvatlas.fleet.store import FleetStore
from kvatlas.settings import PublishSettings
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import Finding, Level, examine
from publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.indexer.running_replica import running_replica
from tests.simulator.running_engine import running_engine

MODEL = "mock-model"


def now_us() -> int:
    return time.time_ns() // 1_000


def endpoint(worker_id: str, **changed: Any) -> EngineEndpoint:
    told: dict[str, Any] = {
        "id": worker_id,
        "kind": EngineKind.VLLM,
        "base_url": f"http://{worker_id}:8000",
        "model_id": MODEL,
        "tokenizer_id": MODEL,
        "block_size": 4,
    }
    return EngineEndpoint(**{**told, **changed})


def record(worker_id: str, *, of_endpoint: Mapping[str, Any] | None = None, **changed: Any) -> FleetRecord:
    """A worker as an indexer writes it down: alive, up, idle."""
    told: dict[str, Any] = {
        "endpoint": endpoint(worker_id, **(of_endpoint or {})),
        "state": EngineState.UP,
        "liveness": Liveness.ALIVE,
        "load": WorkerState(id=worker_id),
        "load_age_us": 0,
        "incarnation": 1,
        "heard_us": now_us(),
    }
    return FleetRecord(**{**told, **changed})


@dataclass(slots=True)
class Installation:
    """`said` examines it."""

    nats: EmbeddedServer
    valkey: EmbeddedServer
    client: Client
    store: Store

    async def said(self, check: str, *, listen_s: float = 0.05) -> list[Finding]:
        """What the doctor says of one check."""
        found = await examine(self.nats.url, self.valkey.url, listen_s=listen_s)
        return [one for one in found if one.check == check]

    async def wrong(self, check: str, *, listen_s: float = 0.05) -> Finding:
        """The one thing that is wrong there."""
        (found,) = [one for one in await self.said(check, listen_s=listen_s) if one.level is not Level.OK]
        return found

    async def config(self, **settings: str | int) -> None:
        """Change the store's configuration."""
        for name, value in settings.items():
            await self.store.client.config_set(name.replace("_", "-"), value)

    async def writes(self, *records: FleetRecord) -> None:
        """Write fleet records, as an indexer does."""
        await FleetStore(self.store).write({one.endpoint.id: one for one in records})

    async def beats(self, worker_id: str, **changed: Any) -> None:
        """Send a heartbeat, as a publisher does."""
        told: dict[str, Any] = {
            "worker_id": worker_id,
            "incarnation": 1,
            "acked_seq": -1,
            "state": EngineState.UP,
            "endpoint": endpoint(worker_id),
            "sent_us": now_us(),
        }
        await self.client.publish(alive_subject(worker_id), Heartbeat(**{**told, **changed}).pack())
        await self.client.flush()

    @asynccontextmanager
    async def replicas(self, *member_ids: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for member_id in member_ids:
                replica = running_replica(self.nats.url, self.valkey.url, member_id=member_id)
                await stack.enter_async_context(replica)
            yield

    @asynccontextmanager
    async def worker(self, worker_id: str, **changed: Any) -> AsyncIterator[str]:
        """A simulated engine and its publisher, known to the indexers; the engine's URL."""
        async with running_engine() as (addresses, _), anyio.create_task_group() as tasks:
            settings = PublishSettings.load(
                nats_url=self.nats.url,
                engine="vllm",
                endpoint=addresses.endpoint,
                replay_endpoint=addresses.replay_endpoint,
                worker_id=worker_id,
                model_id=MODEL,
                engine_url=addresses.base_url,
                **changed,
            )
            tasks.start_soon(run_sidecar, settings)

            async def is_known() -> bool:
                known = (await FleetStore(self.store).all()).get(worker_id)
                return known is not None and known.routable and known.load is not None

            await until(is_known, what=f"{worker_id} is known")
            yield addresses.base_url
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def installation() -> AsyncIterator[Installation]:
    """Empty servers."""
    async with nats_server() as nats, valkey_server() as valkey:
        client = await connect_nats(nats.url, name="test", wait=False)
        store = await open_store(valkey.url, wait=False)
        try:
            yield Installation(nats, valkey, client, store)
        finally:
            await store.close()
            await client.close()
