"""Attacks on a picker by clients behind its gateway, through a real Envoy, and by others who can reach the picker."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from kvatlas_router.gateway.server import SERVICE
from kvatlas_router.gateway.service import RunningPicker
from tests.attacks.guarded_router import ACMES_PROMPT
from tests.eventually import until
from tests.router.gateway.envoy import TENANT_METADATA, EnvoyProcess
from tests.router.gateway.gateway import Gateway, running_gateway, running_picker
from tests.router.gateway.messages import answer_headers, request_body, request_headers
from tests.router.proxy.engines import MODEL, record
from tests.router.proxy.faulty_engine import faulty_engine

pytestmark = pytest.mark.anyio

CLAIMS = {
    "x-tenant": "acme",
    "x-kvatlas-tenant": "acme",
    "x-gateway-inference-fairness-id": "acme",
    "x-gateway-inference-objective": "urgent",
    "x-kvatlas-priority": "-9",
    "test.tenants": "acme",
}
ROUTES = {
    "x-gateway-destination-endpoint": "169.254.169.254:80",
    "x-gateway-destination-endpoint-served": "169.254.169.254:80",
    "x-prefiller-host-port": "169.254.169.254:80",
    "x-data-parallel-rank": "7",
}
"""Headers with which a client would choose where its request goes."""


def body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": ACMES_PROMPT, "max_tokens": 1, **more}


@dataclass(frozen=True, slots=True)
class Setup:
    gateway: Gateway
    picker: RunningPicker

    async def cached(self, listener: str, **more: object) -> int:
        """Predicted cached tokens of a request with every claim to be acme's; one from acme itself claims to be another
        tenant's."""
        headers = {**CLAIMS, "x-tenant": "other"} if listener == "of acme" else CLAIMS
        answer = await self.gateway[listener].post("/v1/completions", json=body(**more), headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-kvatlas-decision"].partition("cached=")[2].partition(";")[0])


@asynccontextmanager
async def setup(envoy: EnvoyProcess, store: Store, valkey_url: str, **settings: Any) -> AsyncIterator[Setup]:
    """A worker for anyone, which has a prompt of acme's, and by default one for acme alone, which can't be reached."""
    async with running_gateway(envoy, store, {"any": {}}) as gateway:
        await gateway.fleet.holds("any", ACMES_PROMPT, Scope(MODEL, MODEL, None, "acme"))
        if not settings:
            acmes = record("acmes", "http://127.0.0.1:9").model_copy(update={"tenants": ("acme",)})
            await FleetStore(store).write({"acmes": acmes})
        async with running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none", **settings) as picker:
            yield Setup(gateway, picker)


async def test_with_the_defaults_no_client_names_its_tenant_or_its_engine(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with setup(envoy, store, valkey_url) as attacked:
        assert await attacked.cached("whole", tenant_id="acme", cache_salt="acme", user="acme") == 0
        for name, value in ROUTES.items():
            answer = await attacked.gateway["whole"].post("/v1/completions", json=body(), headers={name: value})
            assert answer.status_code == 200 and answer.headers["x-kvatlas-decision"].startswith('"any"'), name
        await attacked.gateway.nothing_is_booked()


@pytest.mark.parametrize("source", ["header:x-tenant", "metadata:" + "/".join(TENANT_METADATA)])
async def test_the_tenant_is_what_the_gateway_says(
    envoy: EnvoyProcess, store: Store, valkey_url: str, source: str
) -> None:
    """If the gateway names none, requests are refused, because nothing that a client says may count."""
    async with setup(envoy, store, valkey_url, tenant_from=source) as attacked:
        assert await attacked.cached("of acme", tenant_id="other", user="other") > 150
        if source.startswith("metadata:"):
            answer = await attacked.gateway["whole"].post("/v1/completions", json=body(), headers=CLAIMS)
            assert answer.status_code == 403
        twice = [("x-tenant", "acme"), ("x-tenant", "other")]
        for sent in ([], [("x-tenant", "")], [("x-tenant", "acme/x")], twice):
            answer = await attacked.gateway["whole"].post("/v1/completions", json=body(), headers=sent)
            assert answer.status_code == 403, sent
        await attacked.gateway.nothing_is_booked()


async def test_a_model_that_no_engine_serves_is_refused_by_an_engine_that_may_see_the_tenants_prompts(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    """This holds however many engines of other tenants there are."""
    async with running_gateway(envoy, store, {"any": {}}) as gateway:
        one = record("others", "http://127.0.0.1:9")
        for number in range(9):
            endpoint = one.endpoint.model_copy(update={"id": f"others-{number}", "model_id": "others-model"})
            others = one.model_copy(update={"endpoint": endpoint, "tenants": ("other",)})
            await FleetStore(store).write({f"others-{number}": others})
        async with running_picker(
            valkey_url, port=envoy.ports.picker, tokenizer="none", tenant_from="metadata:" + "/".join(TENANT_METADATA)
        ):
            for _ in range(5):
                answer = await gateway["of acme"].post("/v1/completions", json=body(model="unknown"))
                assert answer.status_code == 404, answer.text
        await gateway.nothing_is_booked()


async def test_paths_of_administration_and_bodies_that_the_picker_can_not_read_reach_no_engine(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with setup(envoy, store, valkey_url) as attacked:
        client = attacked.gateway["whole"]
        paths = ("/pause", "/sleep", "/v1/load_lora_adapter", "/v1/../pause", "/v1//pause", "/%70ause")
        for path in (*paths, "/pause%0A", "/sleep%0a", "/v1/load_lora_adapter%0A", "/pause%00"):
            request = httpx.Request("POST", str(client.base_url).rstrip("/") + path, json={})
            assert (await client.send(request)).status_code in (400, 403, 404), path
        for content in (b"{", b"[" * 100_000, b'{"model": "\xff"}', b'{"prompt": "\\ud800", "model": "m"}'):
            answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, content[:20]
        for kind in ("text/plain", "image/png"):  # an engine may read any of them as JSON
            answer = await client.post("/v1/new", content=b'{"a": "\\ud800"}', headers={"content-type": kind})
            assert answer.status_code == 400, kind
        await attacked.gateway.nothing_is_booked()
        assert (await client.post("/v1/completions", json=body())).status_code == 200


async def test_hostile_messages_end_their_own_stream_alone(envoy: EnvoyProcess, store: Store, valkey_url: str) -> None:
    """Anyone who can reach the picker's port may send what no gateway sends."""
    asked = json.dumps(body()).encode()
    acts: dict[str, list[ProcessingRequest | bytes]] = {
        "no message": [b"\xff" * 100],
        "an answer without a request": [answer_headers()],
        "a body without headers": [request_body(asked, over=True)],
        "headers twice": [request_headers(), request_headers()],
        "a body behind its end": [request_headers(over=True), request_body(asked)],
        "an answer's status that is none": [request_headers(over=True), answer_headers("9" * 10_000)],
        "a message above the limit": [request_headers(), request_body(b"x" * (70 << 20))],
        "many headers": [request_headers({f"x-{number}": "y" * 50 for number in range(20_000)})],
        "nothing more": [request_headers(), request_body(b'{"mo')],
    }
    async with setup(envoy, store, valkey_url) as attacked:
        for act, messages in acts.items():
            await asyncio.wait_for(_send(attacked.picker.server.port, messages), 60)
            answer = await attacked.gateway["whole"].post("/v1/completions", json=body())
            assert answer.status_code == 200, act
        await attacked.gateway.nothing_is_booked()


async def _send(port: int, messages: list[ProcessingRequest | bytes]) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Process", _serialize, ProcessingResponse.FromString)()
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            call.cancel()


def _serialize(message: ProcessingRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 1 << 80, "completion_tokens": 1 << 80},
        {"prompt_tokens": -5, "completion_tokens": -(1 << 62)},
        {"prompt_tokens": True, "completion_tokens": "many"},
        {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 1 << 70}},
    ],
)
async def test_false_usage_of_an_engine_stops_no_picker(
    envoy: EnvoyProcess, store: Store, valkey_url: str, usage: dict[str, object]
) -> None:
    async def lie(_: Request) -> Response:
        text = json.dumps(
            {"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": "a"}], "usage": usage}
        )
        return Response(text, media_type="application/json")

    async with faulty_engine(lie) as engine, running_gateway(envoy, store, {}) as gateway:
        await FleetStore(store).write({"w1": record("w1", engine.url)})
        async with running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none") as picker:
            for _ in range(3):
                assert (await gateway["whole"].post("/v1/completions", json=body())).status_code == 200
            await gateway.nothing_is_booked()

            async def are_counted() -> bool:
                return picker.counters.answered == 3

            await until(are_counted, what="the answers are counted")
            for report in picker.client.answers.reports().values():
                report.pack()
