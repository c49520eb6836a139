"""Engines that fetch each other's KV because the router says so: simulated engines, and engines that show their requests."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import FleetRecord, KvConnector
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.router.proxy.engines import MODEL, Fleet, record, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 901))
HELD = 600
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
BUSY = {"queued_prefill_tokens": 200_000}
ENGINE: dict[str, Any] = {"kv_connector": "p2p", "seed": 7, "num_gpu_blocks": 512}
P2P = {"kv_connector": KvConnector.P2P, "kv_tiers": (Tier.HBM,)}
running_quiet_proxy = partial(running_proxy, tokenizer="none", learn=False, access_log=False)


def peer(id: str, url: str, load: Mapping[str, Any] | None = None, **changed: Any) -> FleetRecord:
    """A worker that others fetch from, at its engine's own port."""
    found = record(id, url, **(load or {}))
    fields = {**P2P, "kv_port": urlsplit(url).port, **changed}
    return found.model_copy(update={"endpoint": found.endpoint.model_copy(update=fields)})


@asynccontextmanager
async def peers(store: Store, *, connector: bool = True, **engine: Any) -> AsyncIterator[Fleet]:
    """`full` holds the prompt and is busy, `free` holds nothing."""
    settings = {**ENGINE, **engine}
    async with running_fleet(store, {"full": settings, "free": settings}) as fleet:
        assert (await fleet.clients["full"].post("/v1/completions", json=BODY)).status_code == 200
        await fleet.holds("full", PROMPT)
        changed = {} if connector else {"kv_connector": None}
        records = {
            id: peer(id, fleet.urls[id], BUSY if id == "full" else {"running_decodes": 0}, **changed)
            for id in ("full", "free")
        }
        await FleetStore(store).write(records)
        fleet.loaded.update(records)
        yield fleet


def usage_of(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def decision_of(answer: httpx.Response) -> dict[str, str]:
    worker, *parts = answer.headers["x-kvatlas-decision"].split(";")
    return {"worker": worker.strip('"'), **dict(part.split("=", 1) for part in parts)}


async def test_a_prompt_that_another_worker_holds_is_fetched_as_predicted(store: Store, valkey_url: str) -> None:
    async with peers(store), running_quiet_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json=BODY)
        decision = decision_of(answer)
        assert (decision["worker"], decision["source"], decision["fetched"]) == ("free", '"full"', str(HELD))
        assert usage_of(answer) == int(decision["cached"]) == HELD


async def test_without_a_connector_nothing_is_priced_predicted_or_fetched(store: Store, valkey_url: str) -> None:
    async with peers(store, connector=False, kv_connector=None), running_quiet_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json=BODY)
        decision = decision_of(answer)
        assert decision["worker"] == "free" and "source" not in decision
        assert usage_of(answer) == int(decision["cached"]) == 0
