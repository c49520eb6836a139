"""The picker's gRPC servers: the external processor on one port, and the health service on both that and a second port."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from kvatlas.errors import SettingsError
from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from kvatlas_router.gateway.ext_proc.stream_state import OutOfOrder
from kvatlas_router.gateway.processor import Processor

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
READINESS = ("", "readiness", SERVICE, "inference-extension")
"""Service names that gateways and probes use in readiness checks. Reference deployments use the last one."""

_log = logging.getLogger("kvatlas_router.gateway")
_Server = grpc.aio.Server


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses on which the servers listen. `credentials=None`: plain text, as the health port always is.
    `shared`: other processes may listen on the same ports."""

    host: str
    port: int
    health_port: int
    credentials: grpc.ServerCredentials | None
    shared: bool = False


class GatewayServer:
    """Both servers. `port` and `health_port`: the bound ports, after `start`."""

    def __init__(self, processor: Processor, addresses: Addresses, *, most_message_bytes: int) -> None:
        self._processor = processor
        self._addresses = addresses
        self._health = health.HealthServicer()
        options = [
            ("grpc.so_reuseport", int(addresses.shared)),
            ("grpc.max_receive_message_length", most_message_bytes),
            ("grpc.max_send_message_length", -1),
        ]
        self._server = grpc.aio.server(options=options)
        self._health_server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        for server in (self._server, self._health_server):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.port = 0
        self.health_port = 0

    async def start(self) -> None:
        """Listen, and report the server as alive but not ready. Raises SettingsError for an address that can't be
        listened on."""
        here = self._addresses
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        self.port = _bind(self._server, here.host, here.port, here.credentials)
        self.health_port = _bind(self._health_server, here.host, here.health_port, None)
        await self._server.start()
        await self._health_server.start()

    async def set_ready(self, ready: bool) -> None:
        """Set the readiness that the health service reports."""
        states = health_pb2.HealthCheckResponse
        for name in READINESS:
            await self._health.set(name, states.SERVING if ready else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Accept no more streams, wait up to `grace_s` for the running ones, then end those that are left."""
        await self._server.stop(grace_s)
        await self._health_server.stop(None)

    async def _process(
        self, requests: AsyncIterator[ProcessingRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        try:
            await self._processor.run(requests, context.write)
        except OutOfOrder as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _bind(server: _Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise SettingsError(f"the endpoint picker can't listen on {address}: {error}") from error
