"""Requests through a real Envoy: engines are picked by what they hold, and answers are followed to the end."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from kvatlas_router.gateway.service import RunningPicker
from kvatlas_router.tokens import Api
from kvatlas_simulator.http.chat_template import render
from tests.eventually import until
from tests.router.apis import TURNS, body_of
from tests.router.disaggregation.test_proxy_pairs import BODY as PAIR_BODY
from tests.router.disaggregation.test_proxy_pairs import BUSY, part
from tests.router.fetching.test_proxy_fetches import peer
from tests.router.gateway.echo_engine import echo_engine
from tests.router.gateway.envoy import SUBSET_HEADER, EnvoyProcess
from tests.router.gateway.gateway import PROMPT, Gateway, running_gateway, running_picker, worker_of
from tests.router.gateway.kubernetes import Namespace
from tests.router.proxy.engines import MODEL, record
from tests.router.proxy.test_proxy import MESSAGES, requests_are

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}


@pytest.fixture
async def gateway(envoy: EnvoyProcess, store: Store) -> AsyncIterator[Gateway]:
    """Three fast engines."""
    async with running_gateway(envoy, store, {"w1": {}, "w2": {}, "w3": {}}) as running:
        yield running


@pytest.fixture
async def picker(envoy: EnvoyProcess, gateway: Gateway, valkey_url: str) -> AsyncIterator[RunningPicker]:
    async with running_picker(valkey_url, port=envoy.ports.picker) as running:
        yield running


async def test_a_completion_goes_to_the_worker_that_holds_its_prompt(gateway: Gateway, picker: RunningPicker) -> None:
    for worker_id in ("w3", "w1", "w2"):
        prompt = [*worker_id.encode(), 5, 6, *PROMPT]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "return_token_ids": True}
        direct = (await gateway.fleet.clients[worker_id].post("/v1/completions", json=body)).json()
        await gateway.fleet.holds(worker_id, prompt)
        answer = await gateway["whole"].post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["choices"] == direct["choices"]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
        assert answer.headers["x-kvatlas-decision"].startswith(f'"{worker_id}";cached=40;prompt=44;attempt=1;by=cost')
    await gateway.nothing_is_booked()
    answers = picker.client.answers.counts
    assert (answers.prompts_equal, answers.cached_equal) == (3, 3)
    assert (picker.counters.by_prompt, picker.counters.answered) == (3, 3)


async def test_a_chat_is_tokenized_and_goes_to_the_worker_that_holds_it(
    envoy: EnvoyProcess, gateway: Gateway, valkey_url: str
) -> None:
    async with running_picker(valkey_url, port=envoy.ports.picker, tokenizer_deadline_ms=20_000) as picker:
        for worker_id in ("w2", "w1"):
            messages = [*MESSAGES, {"role": "user", "content": worker_id}]
            await gateway.fleet.holds(worker_id, list(render(messages).encode()))
            body = {"model": MODEL, "messages": messages, "max_tokens": 2}
            answer = await gateway["whole"].post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and worker_of(answer) == worker_id
            streamed = await gateway["whole"].post("/v1/chat/completions", json={**body, "stream": True})
            assert worker_of(streamed) == worker_id and streamed.text.endswith("data: [DONE]\n\n")
        await gateway.nothing_is_booked()
        answers = picker.client.answers.counts
        assert (answers.prompts_equal, answers.prompts_differ) == (4, 0)


@pytest.mark.parametrize("api", Api)
async def test_every_api_goes_to_the_worker_that_holds_its_prompt(
    envoy: EnvoyProcess, store: Store, valkey_url: str, api: Api
) -> None:
    engine = {"enable_scale_out": True, "num_gpu_blocks": 1_024}
    async with (
        running_gateway(envoy, store, {"w1": engine, "w2": engine}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker, tokenizer_deadline_ms=20_000) as picker,
    ):
        for worker_id in ("w2", "w1"):
            turns = [*TURNS[:1], ("user", worker_id)]
            body = body_of(api, turns)
            text = render([{"role": role, "content": text} for role, text in turns])
            await gateway.fleet.holds(worker_id, list(text.encode()))
            answer = await gateway["whole"].post(api, json=body)
            assert answer.status_code == 200 and worker_of(answer) == worker_id
        await gateway.nothing_is_booked()
        answers = picker.client.answers.counts
        assert (answers.prompts_equal, answers.prompts_differ, picker.counters.by_prompt) == (2, 0, 2)


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_stream_passes_unchanged_and_has_its_usage_only_if_the_client_asks(
    gateway: Gateway, picker: RunningPicker, wanted: bool
) -> None:
    body: dict[str, Any] = {**ASK, "stream": True}
    if wanted:
        body["stream_options"] = {"include_usage": True}
    text = (await gateway["whole"].post("/v1/completions", json=body)).text
    direct = (await gateway.fleet.clients["w1"].post("/v1/completions", json=body)).text
    own, expected = (
        [json.loads(line[6:]) for line in each.split("\n\n") if line and line != "data: [DONE]"]
        for each in (text, direct)
    )
    assert [event["choices"] for event in own] == [event["choices"] for event in expected]
    assert text.endswith("data: [DONE]\n\n") and len(own) == (6 if wanted else 5)
    await gateway.nothing_is_booked()
    assert picker.client.answers.counts.prompts_equal == 1


async def test_a_client_that_goes_away_before_or_in_the_answer_ends_its_request_and_its_booking(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    slow = {"speed_up": 1, "decode_step_us": 100_000}
    async with (
        running_gateway(envoy, store, {"w1": slow}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker) as picker,
    ):
        body, engine = {**ASK, "max_tokens": 150}, gateway.fleet.clients["w1"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(gateway["whole"].post, json=body), "/v1/completions")
            await until(partial(requests_are, engine, "running", 1), what="the engine runs the request")
            tasks.cancel_scope.cancel()
        await until(partial(requests_are, engine, "running", 0), what="the engine gave the request up")
        async with gateway["whole"].stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            events = await _first_lines(answer, 3)  # while the answer is generated
            assert all(line.startswith("data: {") for line in events)
        await until(partial(requests_are, engine, "running", 0), what="the engine gave the stream up")
        await gateway.nothing_is_booked()
        assert (picker.counters.gone, picker.counters.answered) == (2, 0)


async def _first_lines(answer: httpx.Response, number: int) -> list[str]:
    found: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            found.append(line)
        if len(found) == number:
            break
    return found


@pytest.mark.parametrize("listener", ["whole", "override host"])
async def test_bodies_of_10_mb_pass_unchanged_both_ways(
    envoy: EnvoyProcess, store: Store, valkey_url: str, listener: str
) -> None:
    url = f"http://127.0.0.1:{envoy.ports.engines[0]}"
    async with (
        running_gateway(envoy, store, {}, {"w1": {"url": url}}) as gateway,
        echo_engine(envoy.ports.engines[0]) as engine,
        running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none") as picker,
    ):
        text = json.dumps({"model": MODEL, "prompt": "The quick brown fox. " * 500_000}).encode()
        assert len(text) > 10 << 20

        async def chunks(body: bytes) -> AsyncIterator[bytes]:
            for at in range(0, len(body), 100_001):
                yield body[at : at + 100_001]

        for kind in ("application/json", "audio/wav"):
            for content in (text, chunks(text)):
                for path in ("/v1/completions", "/v1/completions?chunked"):
                    given = chunks(text) if content is not text else text
                    answer = await gateway[listener].post(path, content=given, headers={"content-type": kind})
                    assert answer.status_code == 200
                    assert hashlib.sha256(answer.content).digest() == hashlib.sha256(text).digest()
        assert [length for _, length in engine.requests] == [len(text)] * 8
        await gateway.nothing_is_booked()
        assert picker.counters.answered == 8


async def test_a_gateway_that_buffers_bodies_refuses_those_above_its_own_limit(
    gateway: Gateway, picker: RunningPicker
) -> None:
    for length, status in ((900_000, 400), (2_000_000, 413)):  # the engine's context is shorter than either
        answer = await gateway["buffered"].post("/v1/completions", json={**ASK, "prompt": [7] * (length // 3)})
        assert answer.status_code == status
    await gateway.nothing_is_booked()
    counters = picker.counters  # the gateway answers before the picker sees the end of its stream
    await until(lambda: (counters.failed, counters.undecided) == (1, 1), what="both are counted")


async def test_only_endpoints_of_the_subset_are_picked(gateway: Gateway, picker: RunningPicker) -> None:
    await gateway.fleet.holds("w1", PROMPT)
    chosen: list[str] = []
    w2, w3 = gateway.endpoint("w2"), gateway.endpoint("w3")
    for number in range(6):
        headers = {SUBSET_HEADER: f"{w2}, {w3}"}
        body = {**ASK, "prompt": [*PROMPT, number]}
        answer = await gateway["whole"].post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        chosen.append(worker_of(answer))
    assert set(chosen) <= {"w2", "w3"}
    answer = await gateway["whole"].get("/v1/models", headers={SUBSET_HEADER: w3})
    assert answer.status_code == 200 and worker_of(answer) == "w3"
    await gateway.nothing_is_booked()


async def test_a_subset_without_a_known_endpoint_is_routed_by_prefix_and_an_empty_one_refused(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with (
        running_gateway(envoy, store, {"w1": {}, "w2": {}}) as gateway,
        echo_engine(envoy.ports.engines[2]) as unpublished,
        running_picker(valkey_url, port=envoy.ports.picker) as picker,
    ):
        headers = {SUBSET_HEADER: unpublished.url.removeprefix("http://")}
        answer = await gateway["whole"].post("/v1/completions", json=ASK, headers=headers)
        assert answer.status_code == 200 and answer.json() == ASK
        # here, too, a client must not say where KV is read from
        own = {**ASK, "bootstrap_host": "10.9.9.9"}
        answer = await gateway["whole"].post("/v1/completions", json=own, headers=headers)
        assert answer.status_code == 200 and answer.json() == {**ASK, "bootstrap_host": None}
        await until(lambda: not picker.counters.in_flight, what="the picker saw the end of the answer")
        assert (picker.counters.unpublished, picker.counters.answered) == (2, 2)
        for nobody in (",", "10.9.9.9"):
            refused = await gateway["whole"].post("/v1/completions", json=ASK, headers={SUBSET_HEADER: nobody})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "service_unavailable"
        assert picker.counters.refused == 2
        await gateway.nothing_is_booked()


@pytest.mark.parametrize(
    "is_the_gateways", [True, False], ids=["a dead engine", "an address that the gateway does not know"]
)
async def test_an_endpoint_that_can_not_answer_costs_a_retry_where_the_gateway_takes_a_list(
    envoy: EnvoyProcess, store: Store, valkey_url: str, is_the_gateways: bool
) -> None:
    dead = f"http://127.0.0.1:{envoy.ports.engines[2] if is_the_gateways else free_port()}"
    async with (
        running_gateway(envoy, store, {"w1": {}, "w2": {}}, {"w3": {"url": dead}}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker, fallbacks=2) as picker,
    ):
        await gateway.fleet.holds("w3", PROMPT)
        answer = await gateway["override host"].post("/v1/completions", json=ASK)
        assert answer.status_code == 200
        await gateway.nothing_is_booked()
        assert (picker.counters.served_elsewhere, picker.counters.answered) == (1, 1)
        assert picker.client.answers.counts.prompts_equal == 0
        # a gateway that does not say who served: the dead worker's prediction is compared
        answer = await gateway["override host, untold"].post("/v1/completions", json=ASK)
        assert answer.status_code == 200
        await gateway.nothing_is_booked()
        assert picker.counters.served_elsewhere == 1
        # a gateway that takes one address only can't read a list
        assert (await gateway["whole"].post("/v1/completions", json=ASK)).status_code == 503
        await gateway.nothing_is_booked()


async def test_200_concurrent_streams_end_without_a_booking(
    envoy: EnvoyProcess, gateway: Gateway, valkey_url: str
) -> None:
    async def one(number: int) -> str:
        body = {**ASK, "prompt": [number, *PROMPT], "stream": True}
        answer = await gateway["whole"].post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        return worker_of(answer)

    # from a busy machine's times, the router would learn that equal engines differ
    async with running_picker(valkey_url, port=envoy.ports.picker, learn=False) as picker:
        chosen = Counter(await asyncio.gather(*(one(number) for number in range(200))))
        await gateway.nothing_is_booked()
        assert (picker.counters.answered, picker.counters.by_prompt) == (200, 200)
        assert picker.client.answers.counts.prompts_equal == 200
        assert len(chosen) == 3 and min(chosen.values()) > 20


async def test_requests_without_a_prompt_go_to_some_engine(gateway: Gateway, picker: RunningPicker) -> None:
    client = gateway["whole"]
    models = await client.get("/v1/models")
    assert models.status_code == 200 and models.json()["data"][0]["id"] == MODEL
    no_model = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    assert no_model.status_code == 200
    form = await client.post("/v1/audio/transcriptions", files={"file": b"RIFF" * 1000}, data={"model": MODEL})
    assert form.status_code == 404  # the simulated engine hears nothing
    for wrong in (
        {"content": b'{"model": "mo'},
        {"json": {**ASK, "model": "nosuch"}},
        {"json": {**ASK, "prompt": [-1]}},
    ):
        answer = await client.post("/v1/completions", **wrong)
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
    await gateway.nothing_is_booked()
    assert (picker.counters.answered, picker.counters.failed, picker.counters.invalid) == (2, 3, 1)
    assert not picker.counters.refused, "alerts are about what clients can't cause"
    assert (picker.counters.by_load, picker.counters.by_prompt) == (4, 1)


async def test_nobody_and_too_much_are_answered_by_the_picker(
    envoy: EnvoyProcess, gateway: Gateway, valkey_url: str
) -> None:
    for worker_id in gateway.fleet.urls:
        await gateway.fleet.report(worker_id, queued_prefill_tokens=100_000)
    async with running_picker(valkey_url, port=envoy.ports.picker, shed=True) as picker:
        refused = await gateway["whole"].post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "4")
        assert "miss the SLO" in refused.json()["error"]["message"]
        await gateway.nothing_is_booked()
        assert picker.counters.shed == 1
    async with running_picker(valkey_url, port=envoy.ports.picker, select_labels="zone=1") as picker:
        refused = await gateway["whole"].post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "its label zone is absent; expected 1" in refused.json()["error"]["message"]
        assert picker.counters.refused == 1
    async with running_picker(valkey_url, port=envoy.ports.picker, max_body_mib=1) as picker:
        for listener in ("whole", "buffered"):
            refused = await gateway[listener].post("/v1/completions", json={**ASK, "user": "x" * (1 << 20)})
            assert refused.status_code == 413, listener
        refused = await gateway["whole"].post("/v1/messages", content=b"[]")
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert refused.json().keys() == {"type", "error"}  # Anthropic's form
        for path in ("/sleep", "/%73leep", "/v1/%2e%2e/sleep"):
            refused = await gateway["whole"].post(path, json={})
            assert refused.status_code == 404 and "not passed on" in refused.json()["error"]["message"]
        assert not picker.counters.by_load


async def test_the_ranks_of_one_engine_share_an_endpoint_and_get_their_header(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with (
        running_gateway(envoy, store, {}) as gateway,
        echo_engine(envoy.ports.engines[0]) as engine,
    ):
        records = {}
        for rank in (0, 1):
            made = record(f"w-dp{rank}", engine.url)
            endpoint = made.endpoint.model_copy(update={"dp_rank": rank})
            records[f"w-dp{rank}"] = made.model_copy(update={"endpoint": endpoint})
        await FleetStore(store).write(records)
        await gateway.fleet.holds("w-dp1", PROMPT)
        async with running_picker(valkey_url, port=envoy.ports.picker, fallbacks=1) as picker:
            assert (await gateway["whole"].post("/v1/completions", json=ASK)).status_code == 200
            await gateway.nothing_is_booked()
            assert picker.counters.answered == 1
        ((headers, _),) = engine.requests
        assert headers["x-data-parallel-rank"] == "1"
        assert headers["x-gateway-destination-endpoint"] == engine.url.removeprefix("http://")


async def test_a_model_is_rewritten_for_the_engine_and_back_in_the_answer(
    envoy: EnvoyProcess, gateway: Gateway, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = {"poolRef": {"name": "kvatlas"}}
    rule = {"matches": [{"model": {"value": "chat"}}], "targets": [{"modelRewrite": MODEL}]}
    rewrite = {"metadata": {"name": "r"}, "spec": {**pool, "rules": [rule]}}
    Namespace(tmp_path, {"llm-d.ai/v1alpha2": {"inferencemodelrewrites": [rewrite]}}).replace_service(monkeypatch)
    async with running_picker(valkey_url, port=envoy.ports.picker, extension_objects="llm-d.ai") as picker:
        whole = await gateway["whole"].post("/v1/completions", json={**ASK, "model": "chat"})
        assert whole.status_code == 200 and whole.json()["model"] == "chat"
        streamed = await gateway["whole"].post("/v1/completions", json={**ASK, "model": "chat", "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert {event["model"] for event in events} == {"chat"} and len(events) == 5
        await gateway.nothing_is_booked()
        assert picker.client.answers.counts.prompts_equal == 2


async def test_a_pair_is_told_to_the_decode_workers_sidecar_and_its_bookings_end(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    decode, prefill = (f"http://127.0.0.1:{port}" for port in envoy.ports.engines[:2])
    busy: dict[str, Any] = BUSY
    records = {"d": part("d", decode, Role.DECODE, **busy), "p": part("p", prefill, Role.PREFILL)}
    told = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.9.9.9"}}
    async with running_gateway(envoy, store, {}) as gateway, echo_engine(envoy.ports.engines[0]) as engine:
        await FleetStore(store).write(records)
        for header in ("x-prefiller-host-port", ""):
            async with running_picker(
                valkey_url, port=envoy.ports.picker, tokenizer="none", prefill_header=header
            ) as picker:
                own = {"X-Prefiller-Host-Port": "10.9.9.9:80", "X-Data-Parallel-Rank": "7", "X-Other": "kept"}
                answer = await gateway["whole"].post("/v1/completions", json={**PAIR_BODY, **told}, headers=own)
                assert answer.status_code == 200 and worker_of(answer) == "d"
                assert not answer.json().get("kv_transfer_params")  # a client must not say where KV is read from
                assert engine.requests[-1][0].get("x-prefiller-host-port") == (
                    prefill.removeprefix("http://") if header else None
                )
                received = engine.requests[-1][0]
                assert received["x-other"] == "kept" and "x-data-parallel-rank" not in received
                await gateway.nothing_is_booked()
                assert picker.counters.answered == 1


async def test_the_worker_to_fetch_from_is_told_to_the_sidecar_or_to_the_engine(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    free, full = (f"http://127.0.0.1:{port}" for port in envoy.ports.engines[:2])
    body: dict[str, Any] = {"model": MODEL, "prompt": list(range(300, 901)), "max_tokens": 1}
    own = {"X-KV-Cache-Source-Host-Port": "10.9.9.9:80"}
    async with running_gateway(envoy, store, {}) as gateway, echo_engine(envoy.ports.engines[0]) as engine:
        await gateway.fleet.holds("full", body["prompt"])
        records = {"free": peer("free", free, {"running_decodes": 0}), "full": peer("full", full, {**BUSY})}
        await FleetStore(store).write(records)
        gateway.fleet.loaded.update(records)
        for header in ("x-kv-cache-source-host-port", ""):
            async with running_picker(
                valkey_url, port=envoy.ports.picker, tokenizer="none", kv_source_header=header
            ) as _:
                answer = await gateway["whole"].post("/v1/completions", json=body, headers=own)
                assert answer.status_code == 200 and worker_of(answer) == "free"
                headers, received = engine.requests[-1][0], answer.json()
                named = (received.get("kv_transfer_params") or {}).get("remote_kv_source")
                if header:
                    assert headers[header] == full.removeprefix("http://") and named is None
                else:
                    assert "x-kv-cache-source-host-port" not in headers
                    assert named is not None and named["remote_port"] == envoy.ports.engines[1]
