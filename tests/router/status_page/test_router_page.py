"""A router's page: its decisions, the fleet, and its probe's answers."""

import re
from pathlib import Path

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind, Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope, pool_id
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from kvatlas_simulator.http.chat_template import render
from tests.http_client import http_client
from tests.kvatlas.status_page.page_text import texts
from tests.router.proxy.engines import MODEL, SCOPE, record, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

TEXT = "Who holds this prefix? It does. " * 8


async def probe(client: httpx.AsyncClient, prompt: str, kind: str, **fields: str) -> str:
    answer = await client.post("/", data={"prompt": prompt, "kind": kind, "model": MODEL, **fields})
    assert answer.status_code == 200, texts(answer.text)
    return texts(answer.text)


async def test_the_page_shows_the_fleet_and_the_decisions_of_the_last_minutes(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {"w1": {}}) as fleet,
        running_proxy(valkey_url, learn=False, tokenizer_deadline_ms=20_000) as client,
    ):
        await fleet.holds("w1", [7] * 32)
        before = texts((await client.get("/")).text)
        assert "no decision in the last 5 minutes" in before and "1 of 1" in before
        assert re.search(r"w1 \| up \| mock-model \| 8 hbm \| 0 \| 0 \| 0%", before)
    async with (
        running_fleet(store, {"w1": {"num_gpu_blocks": 256}}),
        running_proxy(valkey_url, learn=False, tokenizer_deadline_ms=20_000) as client,
    ):
        for _ in range(3):
            asked = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
        page = texts((await client.get("/")).text)
        found = re.search(r"w1 \| 3 \| 100% \| 768 \| \d+% \| (\d+)% \| 0 \|", page)
        assert found is not None, page
        assert found[1] == "66"  # all but the last block of the second and the third prompt
        assert "The last 3" in page and (await client.head("/")).status_code == 200


async def test_a_probe_says_who_holds_it_what_it_would_cost_and_who_would_get_it(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {"w1": {}, "w2": {}}) as fleet,
        running_proxy(valkey_url, learn=False, tokenizer_deadline_ms=20_000) as client,
    ):
        await fleet.holds("w2", list(TEXT.encode()))
        as_text = await probe(client, TEXT, "text")
        assert "w2 would be chosen: 252 prompt tokens cached" in as_text
        assert re.search(
            r"worker \| usable tokens \| prefill, ms \| decode steps, ms \| .*cost, ms \| first token \|", as_text
        )
        assert re.search(r"w2 \| 252 (\| [\d.]+ )+\| [\d.]+ ms \|", as_text)
        assert re.search(r"w1 \| 0 \| [\d.]+ \|", as_text)
        assert "w2 | 64 of 64 | 256 | 256 hbm | 252" in as_text and "w1 | 0 of 64 | 0 | – | 0" in as_text
        as_tokens = await probe(client, " ".join(str(one) for one in TEXT.encode()), "tokens")
        assert "w2 would be chosen: 252 prompt tokens cached" in as_tokens
        await fleet.holds("w1", list(render([{"role": "user", "content": TEXT}]).encode()))
        assert "w1 would be chosen" in await probe(client, TEXT, "chat")
        assert not await store.client.zcard(pool_keys(pool_id(MODEL, MODEL))[3])
        assert "no decision in the last 5 minutes" in texts((await client.get("/")).text)


async def test_a_probe_sees_another_tenant_only_if_it_asks_for_it(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {"w1": {}}) as fleet,
        running_proxy(valkey_url, learn=False, tokenizer_deadline_ms=20_000) as client,
    ):
        await fleet.holds("w1", list(TEXT.encode()), Scope(MODEL, MODEL, tenant_id="acme"))
        assert "acme" not in (await client.get("/")).text
        assert "w1 | 0 of 64 | 0" in await probe(client, TEXT, "text")
        assert "w1 | 64 of 64 | 256" in await probe(client, TEXT, "text", tenant="acme")


async def test_a_probe_explains_who_is_no_candidate_and_prompts_without_token_ids(
    store: Store, valkey_url: str
) -> None:
    async with (
        running_fleet(store, {"w1": {}}, {"gone": {"url": "http://127.0.0.1:1"}}) as fleet,
        running_proxy(valkey_url, tokenizer="none", deny_workers=("gone",)) as client,
    ):
        await fleet.report("w1")
        page = await probe(client, TEXT, "text")
        assert re.search(r"gone (\| – )+\| no candidate: it is on the deny list", page)
        assert "token ids are not known (off)" in page
        for prompt, model, line in (
            ("1, x", MODEL, "token 1 is 'x'; expected an integer"),
            ("1, 2", "other", "the model 'other' does not exist"),
        ):
            data = {"prompt": prompt, "kind": "tokens", "model": model}
            answer = await client.post("/", data=data)
            assert answer.status_code in (400, 503) and line in texts(answer.text)


async def test_a_probe_tells_both_workers_of_a_pair(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"p": {}, "d": {}}) as fleet:
        for worker_id, role, queued in (("p", Role.PREFILL, 0), ("d", Role.DECODE, 100_000)):
            one = record(worker_id, fleet.urls[worker_id], queued_prefill_tokens=queued)
            endpoint = one.endpoint.model_copy(update={"role": role, "kind": EngineKind.SGLANG})
            await FleetStore(store).write({worker_id: one.model_copy(update={"endpoint": endpoint})})
        async with running_proxy(valkey_url, learn=False, tokenizer_deadline_ms=20_000) as client:
            page = await probe(client, " ".join(["7"] * 4_000), "tokens")
            assert "p for the prompt and d for the answer would be chosen" in page
            assert "as the prefill worker" in page and "as the decode worker" in page
            assert not await store.client.zcard(pool_keys(SCOPE.pool_id)[3])


async def test_a_server_that_needs_a_token_keeps_its_page_from_others(
    valkey_url: str, store: Store, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    port = free_port()
    async with (
        running_fleet(store, {"w1": {}}),
        running_proxy(valkey_url, control_token_file=token, control_port=port) as tenants,
        http_client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        assert (await client.get("/")).status_code == 401
        shown = await client.get("/", headers={"authorization": "Bearer secret-token"})
        assert shown.status_code == 200 and "secret-token" not in shown.text
        assert (await tenants.get("/")).status_code == 404
