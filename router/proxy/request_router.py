"""The parts that turn requests into choices: a router client over the store, a request reader, the catalogue of models.

The proxy and the endpoint picker share them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvatlas.block_lookup.hash_client import EngineHashes
from kvatlas.cost.rates_file import read_profile
from kvatlas.ejection import EjectionStore
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.request import Slo
from kvatlas.reservations import RedisReservations
from kvatlas.settings import RoutingSettings
from kvatlas.store.connection import Store, reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas.telemetry import export_metrics
from kvatlas_router.admission.admission import Admission, AdmissionCounters, AdmissionSettings
from kvatlas_router.admission.queue import AdmissionQueue, QueueSettings
from kvatlas_router.disaggregation.pair_booker import PairBooker
from kvatlas_router.ejection.avoidance import Avoidance
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.progress.engine_progress import Probe
from kvatlas_router.progress.monitor import ProgressMonitor
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader
from kvatlas_router.prompts.request_source import open_request_source
from kvatlas_router.tokens.counters import TokenCounters
from kvatlas_router.tokens.prompt_reader import PromptSettings
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient
from kvatlas_router.upstream.small_request import ask_for_a_token
from router_client.client import RouterClient
from router_client.decision.selector import Selector
from router_client.decision.shadow_policy import RoundRobin
from router_client.pricing.overlap import OverlapIndex, ResidencyOnly
from router_client.prompt import Prompt
from router_client.results import headers_for
from router_client.settings import LearningSettings, LimitSettings, RouterSettings, SloMode

_log = logging.getLogger("kvatlas_router.proxy")

MOST_WARM_POOLS = 16
WARM_CONNECTIONS = 8
WARM_TOKENS = 1_024
WARM_S = 5.0
"""The most time that startup spends on warming up."""
PROBE_S = 600.0
"""The most time for a probe of a stalled engine, which stays stalled in the meantime."""


@dataclass(frozen=True, slots=True)
class RequestRouter:
    """`client` chooses and books; `reader` turns requests into prompts in the scopes of `catalogue`. `ejections` and `progress`
    find the workers to avoid: those that fail, and those that stall. `short_calls`: client for quick engine calls.
    `addresses`: which addresses engines may have. `fleet` and `index`: the store's view of workers, for the status page."""

    client: RouterClient
    reader: RequestReader
    catalogue: Catalogue
    tokens: TokenCounters
    ejections: EjectionMonitor
    progress: ProgressMonitor
    short_calls: EngineClient
    addresses: AddressPolicy
    fleet: FleetStore
    index: AnsweringIndex

    async def warm_up(self) -> None:
        """Connect to the store and read what the first requests need, so that they don't fall open. Raises nothing; requests
        wait for anything that was not read in time."""
        try:
            async with asyncio.timeout(WARM_S):
                await self._read_pools()
        except (KvatlasError, *STORE_FAILURES) as error:
            _log.warning("first read of the fleet failed (%s); continuing", reason(error))

    async def _read_pools(self) -> None:
        pools = {record.endpoint.pool_id: record for record in (await self.catalogue.records()).values()}
        for record in list(pools.values())[:MOST_WARM_POOLS]:
            scope = Scope(record.endpoint.model_id, record.endpoint.tokenizer_id)
            prompt = Prompt.of_tokens(scope, [0] * WARM_TOKENS)
            await asyncio.gather(*(self.client.rank(prompt) for _ in range(WARM_CONNECTIONS)))


@asynccontextmanager
async def open_request_router(
    settings: RoutingSettings, near: bool, credentials_to: tuple[str, ...] = ()
) -> AsyncIterator[RequestRouter]:
    """Open the parts, and export their counters. `near`: this process listens on loopback, so engines may be on loopback
    too. `credentials_to`: see `AddressPolicy`.

    Raises SettingsError for a tokenizer that can't be read, or Unreachable or LayoutMismatch if the store can't be used and
    `wait` is off.
    """
    slo = Slo(ttft_ms=settings.slo_ttft_ms, tpot_ms=settings.slo_tpot_ms)
    session_headers = tuple(name.lower() for name in settings.session_headers)
    prompts = PromptSettings(settings.output_tokens, settings.salt_is_tenant, slo, session_headers)
    async with AsyncExitStack() as stack:
        reading = await stack.enter_async_context(open_request_source(settings, near, prompts, credentials_to))
        store, catalogue = reading.store, reading.catalogue
        engine_hashes = EngineHashes(settings.nats, name="kvatlas-router")
        stack.push_async_callback(engine_hashes.close)
        client = await stack.enter_async_context(_build_client(settings, store, reading.lookups, engine_hashes))
        stack.enter_context(export_metrics("router", client.counters))
        stack.enter_context(export_metrics("answers", client.answers.counts))
        ejections = EjectionMonitor(EjectionStore(store), client.router_id, catalogue.members_of)
        ejections.start()
        stack.push_async_callback(ejections.stop)
        stack.enter_context(export_metrics("ejections", ejections.counters))
        stack.enter_context(export_metrics("ejected", ejections))
        probes = await stack.enter_async_context(EngineClient(reading.addresses, PROBE_S))
        progress = _build_progress(catalogue, probes)
        client.answers.stalled_by_pool = progress.stalled_by_pool
        progress.start()
        stack.push_async_callback(progress.stop)
        stack.enter_context(export_metrics("progress", progress.counters))
        yield RequestRouter(
            client,
            reading.reader,
            catalogue,
            reading.tokens,
            ejections,
            progress,
            reading.short_calls,
            reading.addresses,
            reading.fleet,
            reading.index,
        )


def build_admission(
    parts: RequestRouter, settings: RoutingSettings, counters: AdmissionCounters, *, apart: bool
) -> Admission:
    """Build the admission according to the settings. `apart`: prefill and decode may run on two workers."""
    pairs = PairBooker(parts.client, parts.catalogue.records, apart=apart)
    avoidance = Avoidance(parts.ejections, parts.catalogue.workers_of, parts.progress.stalled_in)
    queue = AdmissionQueue(
        QueueSettings(settings.queue_requests, settings.queue_tokens, settings.queue_wait_s), parts.client
    )
    headers = settings.tenant_header.lower(), settings.priority_header.lower()
    return Admission(pairs, avoidance, queue, counters, AdmissionSettings(settings.shed, *headers))


def _build_progress(catalogue: Catalogue, client: EngineClient) -> ProgressMonitor:
    async def send_probe(record: FleetRecord) -> Probe:
        endpoint = record.endpoint
        return await ask_for_a_token(client, endpoint.url, catalogue.served_name(endpoint), headers_for(endpoint))

    return ProgressMonitor(catalogue.records, send_probe)


def _build_client(
    settings: RoutingSettings, store: Store, index: OverlapIndex, engine_hashes: EngineHashes
) -> RouterClient:
    return RouterClient(
        index if settings.marks else ResidencyOnly(index),
        FleetStore(store),
        RouterSettings(
            profile=read_profile(settings.cost_profile, settings.rates_file),
            deadline_ms=settings.decision_deadline_ms,
            learning=LearningSettings(on=settings.learn),
            follow=RoundRobin() if settings.follow == "round_robin" else None,
            limits=LimitSettings(slo=SloMode(settings.slo)),
            select=_build_selector(settings),
            session_us=settings.session_ms * 1_000,
            temperature=settings.temperature,
        ),
        reservations=RedisReservations(store, index if isinstance(index, AnsweringIndex) else None),
        store=store,
        engine_hashes=engine_hashes,
    )


def _build_selector(settings: RoutingSettings) -> Selector | None:
    labels, allow, deny = settings.select_labels, settings.allow_workers or None, settings.deny_workers
    return Selector(labels, allow, deny) if labels or allow or deny else None
