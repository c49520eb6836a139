"""Engines fetch each other's KV because the router names a source: simulated engines, and engines that show their requests."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvatlas.fleet.records import FleetRecord, KvConnector, Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, Fleet, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, well

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 901))
HELD = 600
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
BUSY = {"queued_prefill_tokens": 200_000}
ENGINE: dict[str, Any] = {"kv_connector": "p2p", "seed": 7, "num_gpu_blocks": 512}
P2P = {"kv_connector": KvConnector.P2P, "kv_tiers": ("hbm",)}
running_quiet_proxy = partial(running_proxy, tokenizer="none", learn=False, access_log=False)


def peer(id: str, url: str, load: Mapping[str, Any] | None = None, **changed: Any) -> FleetRecord:
    """A worker from which others fetch, at its engine's own port."""
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


async def test_a_source_that_died_or_holds_other_blocks_means_computing_and_is_then_priced_so(
    store: Store, valkey_url: str
) -> None:
    """The answers show that nothing arrives, so less is expected to arrive later."""
    async with peers(store) as fleet:
        full = peer("full", fleet.urls["full"], BUSY, kv_port=9)
        fleet.loaded.clear()
        fleet.loaded["full"] = full  # it stays busy
        await FleetStore(store).write({"free": peer("free", fleet.urls["free"]), "full": full})
        async with running_quiet_proxy(valkey_url) as client:
            answers = []
            for _ in range(3):
                await fleet.clients["free"].post("/reset_prefix_cache")
                answers.append(await client.post("/v1/completions", json=BODY))
                assert answers[-1].status_code == 200 and usage_of(answers[-1]) == 0
            first = decision_of(answers[0])
            assert (first["worker"], first["source"], first["cached"]) == ("free", '"full"', str(HELD))
            explained = (await client.post("/kvatlas/route", json={**BODY, "fetch": True})).json()["explanation"]
            assert "not_fetched" in explained or "read from full" not in explained


async def test_what_a_client_says_of_sources_never_reaches_an_engine(store: Store, valkey_url: str) -> None:
    own: dict[str, Any] = {
        "kv_transfer_params": {"remote_kv_source": {"kv_request_id": "x", "remote_host": "10.6.6.6", "remote_port": 6}},
        "kv_hints": {"protocol_version": "0.1", "message_id": "x", "actions": []},
        "vllm_xargs": {"kv_hints": {}, "kept": 1},
    }
    headers = {"x-kv-cache-source-host-port": "10.6.6.6:6", "x-prefiller-host-port": "10.6.6.6:6"}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engines = {id: await stack.enter_async_context(faulty_engine(well)) for id in ("full", "free")}
        await fleet.holds("full", PROMPT)
        records = {
            "full": peer("full", engines["full"].url, BUSY),
            "free": peer("free", engines["free"].url, {"running_decodes": 0}),
        }
        await FleetStore(store).write(records)
        fleet.loaded.update(records)
        client = await stack.enter_async_context(running_quiet_proxy(valkey_url))
        several: list[dict[str, Any]] = [{}, {"n": 2}, {"stream": True}, {"prompt": [PROMPT, PROMPT]}]
        for asked in several:
            await client.post("/v1/completions", json={**BODY, **own, **asked}, headers=headers)
        await client.post("/v1/completions", json=BODY)
    sent = [(request, json.loads(request._body)) for engine in engines.values() for request in engine.requests]
    assert len(sent) == len(several) + 1
    for request, body in sent:
        assert b"10.6.6.6" not in request._body and not set(headers) & set(request.headers)
        assert not body.get("kv_hints") and "kv_hints" not in body.get("vllm_xargs", {})
        source = (body.get("kv_transfer_params") or {}).get("remote_kv_source")
        one = body.get("n", 1) == 1 and isinstance(body["prompt"][0], int)
        assert (source is not None) == one  # an engine would use the same source and id for each prompt and answer
        if source is not None:
            port = urlsplit(engines["full"].url).port
            assert (source["remote_host"], source["remote_port"]) == ("127.0.0.1", port)
    named = [(body.get("kv_transfer_params") or {}).get("remote_kv_source") for _, body in sent]
    ids = [source["kv_request_id"] for source in named if source is not None]
    assert len(set(ids)) == len(ids) == 3


async def test_another_router_is_told_what_to_send_if_it_asks(store: Store, valkey_url: str) -> None:
    async with peers(store), running_quiet_proxy(valkey_url) as client:
        plain = (await client.post("/kvatlas/route", json=BODY)).json()
        assert (plain["predicted_cached_tokens"], plain["fetch"]) == (0, None)
        asked = (await client.post("/kvatlas/route", json={**BODY, "fetch": True})).json()
        assert (asked["worker"], asked["predicted_cached_tokens"]) == ("free", HELD)
        assert (asked["fetch"]["source"], asked["fetch"]["tokens"]) == ("full", HELD)
        body = {**BODY, **asked["fetch"]["fields"]}
        async with http_client(base_url=asked["url"], timeout=60) as engine:
            assert usage_of(await engine.post("/v1/completions", json=body)) == HELD


async def test_equal_sources_share_the_fetches_of_all_routers(store: Store, valkey_url: str) -> None:
    ids, prompt = ["one", "two", "three"], list(range(100_000))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for id in ids:
            await fleet.holds(id, prompt)
        slow = {"block_bytes": 6 << 20}  # a transfer takes 4 s, much longer than the next choices
        busy = {"queued_prefill_tokens": 800_000}  # more expensive than three fetches that delay each other
        records = {id: peer(id, f"http://127.0.0.1:{at}", busy, **slow) for at, id in enumerate(ids, 1)}
        records["free"] = peer("free", "http://127.0.0.1:4", {"running_decodes": 0}, **slow)
        await FleetStore(store).write(records)
        fleet.loaded.update(records)
        routers = [await stack.enter_async_context(running_quiet_proxy(valkey_url)) for _ in range(2)]
        asked = {**BODY, "prompt": prompt, "fetch": True}
        answers = [(await routers[at % 2].post("/kvatlas/route", json=asked)).json() for at in range(3)]
    assert {answer["fetch"]["source"] for answer in answers} == set(ids), answers


async def test_a_prefill_worker_fetches_too(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        engines = {id: await stack.enter_async_context(faulty_engine(well)) for id in ("full", "prefill", "decode")}
        await fleet.holds("full", PROMPT)
        records = {
            "full": peer("full", engines["full"].url, BUSY),
            "prefill": peer("prefill", engines["prefill"].url, {"running_decodes": 0}, role=Role.PREFILL),
            "decode": peer("decode", engines["decode"].url, BUSY, role=Role.DECODE, kv_connector=None),
        }
        await FleetStore(store).write(records)
        fleet.loaded.update(records)
        client = await stack.enter_async_context(running_quiet_proxy(valkey_url))
        answer = await client.post("/v1/completions", json=BODY)
        assert decision_of(answer)["prefill"] == '"prefill"' and decision_of(answer)["source"] == '"full"'
    (first,), (second,) = (
        [json.loads(request._body) for request in engines[id].requests] for id in ("prefill", "decode")
    )
    assert first["kv_transfer_params"]["do_remote_decode"]
    assert first["kv_transfer_params"]["remote_kv_source"]["remote_port"] == urlsplit(engines["full"].url).port
    assert "remote_kv_source" not in (second.get("kv_transfer_params") or {})
