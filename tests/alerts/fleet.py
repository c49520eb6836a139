"""The fleet whose alerts are watched: every part is a separate process, and serves requests."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import grpc
import httpx

from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.async_servers import EmbeddedServer
from kvatlas.embedded.free_port import LOOPBACK, free_port
from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from kvatlas_router.gateway.server import SERVICE
from tests.alerts.odd_engine import OddEngine, odd_engine
from tests.certificates import Authority
from tests.chaos.child_process import ChildProcess
from tests.http_client import http_client
from tests.router.gateway.messages import answer_body, answer_headers, request_body, request_headers

REQUESTS_PER_S = 8
PICKS_PER_S = 2


@dataclass(slots=True)
class Fleet:
    """All parts, by kind."""

    nats: EmbeddedServer
    valkey: EmbeddedServer
    engines: list[ChildProcess]
    sidecars: list[ChildProcess]
    indexer: ChildProcess
    router: ChildProcess
    wrong_sidecar: ChildProcess
    wrong_ports: list[int]
    odd_sidecar: ChildProcess
    odd: OddEngine
    router_url: str
    picker_port: int
    ports: list[int]
    tls_router: ChildProcess
    fresh: bool = False
    """True if requests share no prefix, so that no engine's cache attracts them."""


@asynccontextmanager
async def running_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Two engines with sidecars, an indexer, a router and a picker, and two sidecars that are not started: one listens to
    sockets of something else, and one belongs to an odd engine without events."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(nats_server())
        store = await stack.enter_async_context(valkey_server())
        servers = ["--nats-url", bus.url, "--redis-url", store.url]
        ports: list[int] = []

        def child(name: str, ready: str, *arguments: str, **variables: str) -> ChildProcess:
            made = ChildProcess(name, arguments, ready, folder, variables=variables)
            stack.callback(made.close)
            return made

        def status_port() -> list[str]:
            ports.append(free_port())
            return ["--status-port", str(ports[-1])]

        def sidecar(worker_id: str, engine_url: str, events: int, replay: int) -> ChildProcess:
            sockets = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
            flags = ["--engine", "vllm", "--worker-id", worker_id, "--model-id", "m", *sockets, "--nats-url", bus.url]
            url = ["--engine-url", engine_url, *status_port()]
            return child(f"sidecar-{worker_id}", "is published", "publish", *flags, *url)

        engines, sidecars = [], []
        for number in range(2):
            http, events, replay = free_port(), free_port(), free_port()
            flags = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
            flags += ["--model", "m", "--port", str(http), "--speed-up", "100"]
            engines.append(child(f"engine-{number}", "engine at", "simulate-engine", *flags))
            sidecars.append(sidecar(f"w{number}", f"http://{LOOPBACK}:{http}", events, replay))
        wrong_ports = [free_port(), free_port()]
        wrong = sidecar("wrong", f"http://{LOOPBACK}:{http}", *wrong_ports)
        odd = stack.enter_context(odd_engine())
        odd_sidecar = sidecar("odd", odd.url, free_port(), free_port())
        flags = ["--stream-storage", "memory", "--scrub-period-s", "3", *status_port()]
        indexer = child("indexer", "is ready", "indexer", *servers, *flags)
        router_port = free_port()
        ports.append(router_port)
        deciding = ["--redis-url", store.url, "--decision-deadline-ms", "2000", "--drain-s", "0"]
        flags = ["--port", str(router_port), "--no-access-log", "--queue-requests", "50", "--queue-wait-s", "5"]
        router = child("router", "router at", "router", *deciding, *flags)
        picker_port = free_port()
        ports.append(free_port())
        flags = ["--port", str(picker_port), "--health-port", "0", "--plaintext", "--pick-deadline-ms", "5000"]
        exporter = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_HOST": LOOPBACK}
        exporter["OTEL_EXPORTER_PROMETHEUS_PORT"] = str(ports[-1])
        picker = child("picker", "endpoint picker on", "epp", *deciding, *flags, **exporter)
        issued = Authority(folder).issue(LOOPBACK, days=9)
        ports.append(free_port())
        tls = ["--port", "0", "--http-cert-file", str(issued.certificate), "--http-key-file", str(issued.key)]
        exporter = {**exporter, "OTEL_EXPORTER_PROMETHEUS_PORT": str(ports[-1])}
        tls_router = child("tls-router", "router at", "router", *deciding, *tls, **exporter)
        parts = [indexer, *engines, *sidecars, router, picker]
        for part in parts:
            part.start()
        for part in parts:
            await part.ready()
        url = f"http://{LOOPBACK}:{router_port}"
        yield Fleet(
            bus,
            store,
            engines,
            sidecars,
            indexer,
            router,
            wrong,
            wrong_ports,
            odd_sidecar,
            odd,
            url,
            picker_port,
            ports,
            tls_router,
        )


async def send_requests(fleet: Fleet) -> None:
    """Send requests with a few prompts, each with a different end, until cancelled. Their outcome shows in the alerts
    alone."""
    number = 0
    async with http_client(base_url=fleet.router_url, timeout=10) as client:

        async def ask(number: int) -> None:
            prompt = (
                f"Conversation {number if fleet.fresh else number % 7}. "
                + "And so on and so on. " * (20 + number % 50)
                + f"This is number {number}."
            )
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": number % 2 == 0}
            try:
                await client.post("/v1/completions", json=body)
            except httpx.HTTPError:
                return

        async with anyio.create_task_group() as group:
            while True:
                number += 1
                group.start_soon(ask, number)
                await anyio.sleep(1 / REQUESTS_PER_S)  # a paced load


async def send_picks(fleet: Fleet) -> None:
    """Ask the picker as a gateway does, until cancelled: requests that are answered as soon as they have an endpoint."""
    number = 0
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{fleet.picker_port}") as channel:
        process = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )

        async def ask(number: int) -> None:
            body = {"model": "m", "prompt": f"Conversation {number % 7} of a gateway.", "max_tokens": 4}
            messages = [request_headers(), request_body(json.dumps(body).encode(), over=True)]
            messages += [answer_headers(), answer_body(b"{}", over=True)]
            try:
                async for _ in process(iter(messages), timeout=10):
                    pass
            except grpc.aio.AioRpcError:
                return

        async with anyio.create_task_group() as group:
            while True:
                number += 1
                group.start_soon(ask, number)
                await anyio.sleep(1 / PICKS_PER_S)  # a paced load
