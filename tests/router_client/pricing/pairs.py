"""Pools of workers that only prefill or decode, and their routers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas.cost import Load
from kvatlas.fleet.records import FleetRecord, Role
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.reservations import Ask, Reservations, WorkerReport
from router_client import (
    Prompt,
    RouterClient,
    RouterSettings,
    StaticFleet,
)
from tests.kvatlas.reservations.asks import offer
from tests.router_client.pools import SCOPE, worker

SETTINGS = RouterSettings(deadline_ms=None)
TOKENS = list(range(8_000))
PROMPT = Prompt.of_tokens(SCOPE, TOKENS, id="r")
QUEUED = {"queued_prefill_tokens": 20_000}


def prefill(id: str, **fields: Any) -> FleetRecord:
    """A prefill worker, idle unless a load is given."""
    return worker(id, role=Role.PREFILL, **{"load": {}, **fields})


def decode(id: str, **fields: Any) -> FleetRecord:
    return worker(id, role=Role.DECODE, **{"load": {}, **fields})


async def router(
    records: Mapping[str, FleetRecord], reservations: Reservations | None = None, **other: Any
) -> RouterClient:
    if reservations is not None:
        await reservations.report(SCOPE.pool_id, {id: WorkerReport.of(record, 0) for id, record in records.items()})
    return RouterClient(MemoryIndex(), StaticFleet(records), replace(SETTINGS, **other), reservations=reservations)


async def load(reservations: Reservations, worker_id: str) -> Load:
    return (await reservations.evaluate(SCOPE.pool_id, Ask([offer(worker_id)]))).by_offer[0].load
