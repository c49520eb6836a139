"""Simulated engines with an endpoint picker and a real Envoy in front of them, and checks for the end of a test."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import grpc
import httpx
import msgpack
from grpc_health.v1 import health_pb2

from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.settings import GatewaySettings
from kvatlas.store.connection import Store
from kvatlas_router.gateway.service import RunningPicker, run_endpoint_picker
from tests.eventually import until
from tests.http_client import http_client
from tests.router.gateway.envoy import EnvoyProcess
from tests.router.proxy.engines import PATIENT_MS, SCOPE, Fleet, running_fleet

PROMPT = list(range(300, 340))


def picker_settings(redis_url: str, **changed: Any) -> GatewaySettings:
    given = {"redis_url": redis_url, "port": 0, "health_port": 0, "wait": False, "plaintext": True}
    given |= {"decision_deadline_ms": PATIENT_MS, "pick_deadline_ms": PATIENT_MS, "drain_s": 0, "grace_s": 5, **changed}
    return GatewaySettings.load(**given)


@asynccontextmanager
async def running_picker(redis_url: str, **changed: Any) -> AsyncIterator[RunningPicker]:
    """A ready picker, in this process."""
    settings = picker_settings(redis_url, **changed)
    found: list[RunningPicker] = []
    up = anyio.Event()

    def ready(running: RunningPicker) -> None:
        found.append(running)
        up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_endpoint_picker, settings, ready)
        with anyio.fail_after(60):
            await up.wait()
        running = found[0]
        await until_health_is(running.server.health_port, "readiness", "SERVING")
        yield running
        tasks.cancel_scope.cancel()


async def health(port: int, name: str) -> str:
    """The health service's status of a name, or the code of its error."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=name))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def until_health_is(port: int, name: str, state: str) -> None:
    async def is_so() -> bool:
        return await health(port, name) == state

    await until(is_so, what=f"{name} is {state}")


@dataclass(slots=True)
class Gateway:
    """Clients by Envoy's listeners."""

    envoy: EnvoyProcess
    fleet: Fleet
    store: Store
    clients: Mapping[str, httpx.AsyncClient]

    def __getitem__(self, listener: str) -> httpx.AsyncClient:
        return self.clients[listener]

    def endpoint(self, worker_id: str) -> str:
        return self.fleet.urls[worker_id].removeprefix("http://")

    async def nothing_is_booked(self) -> None:
        """Wait until no stream runs in this process's picker, and no booking is left in the pool. An id that was called off
        before its booking came has an entry without a worker, so that the booking is refused."""
        _, _, reservations, *_ = pool_keys(SCOPE.pool_id)

        async def is_empty() -> bool:
            return not any(msgpack.unpackb(entry)[0] for entry in await self.store.client.hvals(reservations))

        await until(is_empty, what="no booking is left")


@asynccontextmanager
async def running_gateway(
    envoy: EnvoyProcess,
    store: Store,
    workers: Mapping[str, Mapping[str, Any]],
    reports: Mapping[str, Mapping[str, Any]] | None = None,
) -> AsyncIterator[Gateway]:
    """Up to three engines on the ports that Envoy knows, and no picker yet. `reports`: see `running_fleet`."""
    placed = {
        worker_id: {**changed, "port": port}
        for (worker_id, changed), port in zip(workers.items(), envoy.ports.engines, strict=False)
    }
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, placed, reports))
        clients = {
            name: await stack.enter_async_context(
                http_client(base_url=envoy.listener(name), timeout=60, limits=httpx.Limits())
            )
            for name in envoy.ports.listeners
        }
        yield Gateway(envoy, fleet, store, clients)


def worker_of(answer: httpx.Response) -> str:
    """The chosen worker according to the answer's decision header."""
    return answer.headers["x-kvatlas-decision"].split('"')[1]
