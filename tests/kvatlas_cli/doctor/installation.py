"""A small separate installation: servers, replicas, and simulated engines with their publishers."""

import sys
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
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.settings import PublishSettings
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import Finding, Level, examine
from kvatlas_publishers.sidecar import run_sidecar
from tests.end_to_end.processes import environment
from tests.eventually import until
from tests.indexer.running_replica import running_replica
from tests.simulator.running_engine import running_engine

MODEL = "mock-model"


def now_us() -> int:
    return time.time_ns() // 1_000


def endpoint(worker_id: str, **changed: Any) -> EngineEndpoint:
    fields: dict[str, Any] = {
        "id": worker_id,
        "kind": EngineKind.VLLM,
        "base_url": f"http://{worker_id}:8000",
        "model_id": MODEL,
        "tokenizer_id": MODEL,
        "block_size": 4,
    }
    return EngineEndpoint(**{**fields, **changed})


def fleet_record(worker_id: str, *, of_endpoint: Mapping[str, Any] | None = None, **changed: Any) -> FleetRecord:
    """A worker's fleet record as an indexer writes it: alive, up, idle."""
    fields: dict[str, Any] = {
        "endpoint": endpoint(worker_id, **(of_endpoint or {})),
        "state": EngineState.UP,
        "liveness": Liveness.ALIVE,
        "load": WorkerState(id=worker_id),
        "load_age_us": 0,
        "incarnation": 1,
        "heard_us": now_us(),
    }
    return FleetRecord(**{**fields, **changed})


@dataclass(slots=True)
class Installation:
    """Servers of one test; `findings` examines them."""

    nats: EmbeddedServer
    valkey: EmbeddedServer
    nats_client: Client
    store: Store

    async def findings(self, check: str, *, listen_s: float = 0.05) -> list[Finding]:
        """The doctor's findings of one check."""
        found = await examine(self.nats.url, self.valkey.url, listen_s=listen_s, settle_s=0.2)
        return [one for one in found if one.check == check]

    async def problem(self, check: str, *, listen_s: float = 0.05) -> Finding:
        """The only finding of the check that is not ok."""
        (found,) = [one for one in await self.findings(check, listen_s=listen_s) if one.level is not Level.OK]
        return found

    async def configure_store(self, **settings: str | int) -> None:
        """Change the store's configuration."""
        for name, value in settings.items():
            await self.store.client.config_set(name.replace("_", "-"), value)

    async def write_records(self, *records: FleetRecord) -> None:
        """Write fleet records, as an indexer does."""
        await FleetStore(self.store).write({one.endpoint.id: one for one in records})

    async def send_heartbeat(self, worker_id: str, **changed: Any) -> None:
        """Send a heartbeat, as a publisher does."""
        fields: dict[str, Any] = {
            "worker_id": worker_id,
            "incarnation": 1,
            "acked_seq": -1,
            "state": EngineState.UP,
            "endpoint": endpoint(worker_id),
            "sent_us": now_us(),
        }
        await self.nats_client.publish(alive_subject(worker_id), Heartbeat(**{**fields, **changed}).pack())
        await self.nats_client.flush()

    @asynccontextmanager
    async def replicas(self, *member_ids: str) -> AsyncIterator[None]:
        """Run indexer replicas."""
        async with AsyncExitStack() as stack:
            for member_id in member_ids:
                replica = running_replica(self.nats.url, self.valkey.url, member_id=member_id)
                await stack.enter_async_context(replica)
            yield

    @asynccontextmanager
    async def worker(self, worker_id: str, **changed: Any) -> AsyncIterator[str]:
        """Run a simulated engine and its publisher; yields the engine's URL once the indexers know it."""
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
async def running_installation() -> AsyncIterator[Installation]:
    """Servers without any data."""
    async with nats_server() as nats, valkey_server() as valkey:
        client = await connect_nats(nats.url, name="test", wait=False)
        store = await open_store(valkey.url, wait=False)
        try:
            yield Installation(nats, valkey, client, store)
        finally:
            await store.close()
            await client.close()


async def run_doctor(installation: Installation, *flags: str) -> tuple[int, str]:
    """Run the command, and return its exit code and stdout."""
    words = ["doctor", "--nats-url", installation.nats.url, "--redis-url", installation.valkey.url, *flags]
    done = await anyio.run_process([sys.executable, "-m", "kvatlas_cli.main", *words], check=False, env=environment())
    assert not done.stderr
    return done.returncode, done.stdout.decode()
