"""Index servers in this process, asked over HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex
from kvatlas.settings import IndexServerSettings
from kvatlas.store.connection import Store
from kvatlas_router.queries.service import run_index_server
from tests.http_client import http_client
from tests.router.proxy.engines import BLOCK_SIZE, PATIENT_MS, SCOPE, record

TOKENS = list(range(1, 17))
"""Four blocks."""


def rank(instance: str, dp_rank: int, **changed: Any) -> FleetRecord:
    """One data-parallel rank of an engine."""
    worker_id = f"{instance}-dp{dp_rank}"
    made = record(worker_id, f"http://{instance}:8000")
    return made.model_copy(update={"endpoint": made.endpoint.model_copy(update={"dp_rank": dp_rank, **changed})})


async def hold(
    index: RedisIndex, worker_id: str, tokens: Sequence[int], tier: Tier = Tier.HBM, scope: Scope = SCOPE
) -> None:
    """Let the index say that a worker holds the full blocks of these tokens."""
    await index.put(ScopeUse(scope, BLOCK_SIZE, 1024), worker_id, tier, extend_chain(tokens, BLOCK_SIZE))


async def write(store: Store, *records: FleetRecord) -> None:
    await FleetStore(store).write({one.endpoint.id: one for one in records})


@asynccontextmanager
async def running_index_server(redis_url: str, **changed: Any) -> AsyncIterator[tuple[httpx.AsyncClient, int | None]]:
    """A client of a server that answers, and the server's gRPC port."""
    given = {"redis_url": redis_url, "port": 0, "wait": False, "tokenizer": "none", **changed}
    settings = IndexServerSettings.load(**given)
    up, found = anyio.Event(), list[tuple[str, int | None]]()

    def ready(url: str, grpc_port: int | None) -> None:
        found.append((url, grpc_port))
        up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_index_server, settings, ready)
        with anyio.fail_after(60):
            await up.wait()
        url, grpc_port = found[0]
        async with http_client(base_url=url, timeout=PATIENT_MS / 1_000) as client:
            yield client, grpc_port
        tasks.cancel_scope.cancel()
