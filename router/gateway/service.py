"""Runs the endpoint picker as a process: the parts that route requests, and the gRPC servers."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import grpc

from kvatlas.addresses import is_loopback
from kvatlas.errors import InvalidValue, SettingsError, Unreachable
from kvatlas.settings import GatewaySettings
from kvatlas.telemetry import export_metrics
from kvatlas_router.gateway.certificate import from_files, self_signed
from kvatlas_router.gateway.counters import GatewayCounters, GatewayGauges
from kvatlas_router.gateway.ext_proc.stream_state import ResponseMode
from kvatlas_router.gateway.extension_objects import ExtensionObjects
from kvatlas_router.gateway.field_metrics import FieldMetrics
from kvatlas_router.gateway.fleet_picker import FleetPicker, FleetPickerSettings
from kvatlas_router.gateway.kubernetes_api import KubernetesApi, open_kubernetes_api
from kvatlas_router.gateway.pool_pods import KubernetesPool, PodList, PoolPods
from kvatlas_router.gateway.processor import Processor, ProcessorSettings
from kvatlas_router.gateway.sender import SenderTrust
from kvatlas_router.gateway.server import Addresses, GatewayServer
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.proxy.request_router import build_admission, open_request_router
from kvatlas_router.tenancy.withheld_fields import PRIORITY_HEADER
from router_client.client import RouterClient
from router_client.pricing.transfer_protocol import WITHHELD_HEADERS

CLOSE_S = 5.0
READY_RETRY_S = 0.5
"""Interval at which the fleet is read again until the picker is ready."""

_log = logging.getLogger("kvatlas_router.gateway")


@dataclass(frozen=True, slots=True)
class RunningPicker:
    """The servers, and the parts that they use."""

    server: GatewayServer
    counters: GatewayCounters
    client: RouterClient


async def run_endpoint_picker(settings: GatewaySettings, ready: Callable[[RunningPicker], None] | None = None) -> None:
    """Serve until cancelled, then drain. `ready` is called once, as soon as requests are accepted.

    The health service reports ready once the fleet has been read, even if it is empty. Raises SettingsError for an address
    that can't be listened on, or a certificate or a tokenizer that can't be read; or Unreachable or LayoutMismatch if the
    store can't be used and `wait` is off.
    """
    stack = AsyncExitStack()
    try:
        pod_list = _pod_list(settings)
        credentials = _credentials(settings)
        api = await stack.enter_async_context(_open_api(settings))
        parts = await stack.enter_async_context(open_request_router(settings, is_loopback(settings.host)))
        pods: PoolPods = (
            pod_list if api is None or not settings.kubernetes_pool else KubernetesPool(api, settings.pool_name)
        )
        objects = ExtensionObjects(
            None if settings.extension_objects == "none" else api, settings.extension_objects, settings.pool_name
        )
        for part in (pods, objects):
            await part.start()
            stack.push_async_callback(part.stop)
        counters = GatewayCounters()
        parts.client.condition.ends = counters.read_ends
        parts.client.condition.proves_tenants = bool(settings.tenant_from)
        stack.enter_context(export_metrics("gateway", counters))
        admission = build_admission(parts, settings, counters, apart=bool(settings.prefill_header))
        stack.push_async_callback(admission.close)
        stack.enter_context(
            export_metrics(
                "gateway_load", lambda: GatewayGauges(counters.in_flight, admission.waiting, admission.pool_waiting)
            )
        )
        choosing = FleetPickerSettings(
            settings.fallbacks,
            settings.ask_usage,
            settings.tenant_header.lower(),
            settings.prefill_header.lower(),
            settings.kv_source_header.lower(),
            trust=settings_trust(settings),
            salts=settings.salt_is_tenant,
            decisions=settings.shows_decisions,
        )
        picker = FleetPicker(parts, admission, pods, objects, counters, choosing)
        stack.push_async_callback(picker.close)
        server = _server(settings, picker, counters, credentials)
        await server.start()
        try:
            if ready is not None:
                ready(RunningPicker(server, counters, parts.client))
            await _wait_for_fleet(parts.catalogue, pods)
            await parts.warm_up()
            await server.set_ready(True)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await _drain(server, settings)
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await stack.aclose()


def _server(
    settings: GatewaySettings,
    picker: FleetPicker,
    counters: GatewayCounters,
    credentials: grpc.ServerCredentials | None,
) -> GatewayServer:
    most_body_bytes = settings.max_body_mib << 20
    waits_s = settings.queue_wait_s if settings.queue_requests else 0.0
    # llm-d's routing sidecars trust a header that names the prefill worker, whichever client sent it
    withheld = {*WITHHELD_HEADERS, settings.prefill_header.lower(), settings.kv_source_header.lower()} - {""}
    if settings.tenant_from:  # a request's id comes from the gateway
        withheld.add(PRIORITY_HEADER.decode())
    processing = ProcessorSettings(
        ResponseMode(settings.response_mode),
        settings.pick_deadline_ms / 1_000 + waits_s,
        most_body_bytes,
        settings.conformance,
        withheld,
    )
    addresses = Addresses(settings.host, settings.port, settings.health_port, credentials, settings.share_port)
    metrics = FieldMetrics(settings.pool_name, picker.ready_endpoints)
    processor = Processor(picker, counters, metrics, processing)
    return GatewayServer(processor, addresses, most_message_bytes=most_body_bytes + (1 << 20))


async def _wait_for_fleet(catalogue: Catalogue, pods: PoolPods) -> None:
    while True:
        try:
            await catalogue.records()
        except Unreachable as error:
            _log.warning("could not read the fleet (%s); not ready, trying again in %g s", error, READY_RETRY_S)
        else:
            if pods.is_known:
                return
        await anyio.sleep(READY_RETRY_S)


async def _drain(server: GatewayServer, settings: GatewaySettings) -> None:
    """Report not ready, give gateways a moment to send their requests elsewhere, then stop."""
    await server.set_ready(False)
    if settings.drain_s:
        _log.info("not ready; accepting requests for another %d s", settings.drain_s)
        await anyio.sleep(settings.drain_s)
    await server.stop(settings.grace_s)


@asynccontextmanager
async def _open_api(settings: GatewaySettings) -> AsyncIterator[KubernetesApi | None]:
    """Open the API; None if nothing is read from it. Raises SettingsError outside a pod."""
    if settings.extension_objects == "none" and not settings.kubernetes_pool:
        yield None
        return
    async with open_kubernetes_api() as api:
        yield api


def _pod_list(settings: GatewaySettings) -> PodList:
    try:
        return PodList(settings.pods)
    except InvalidValue as error:
        raise SettingsError(f"--{error}") from error


def _credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    if settings.plaintext:
        return None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        return from_files(settings.tls_certificate, settings.tls_key)
    return self_signed()


def settings_trust(settings: GatewaySettings) -> SenderTrust:
    """Raises SettingsError."""
    try:
        trust = SenderTrust.of(settings.trusted_headers, settings.tenant_from)
    except InvalidValue as error:
        raise SettingsError(f"--tenant-from is {error}") from None
    if not settings.tenant_from:
        _log.info("every request belongs to the tenant of --tenant-id; to separate tenants, set --tenant-from")
    return trust
