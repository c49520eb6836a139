"""What turns requests into choices: a router client over the store, a reader of requests, the catalogue of models.

The proxy and the endpoint picker stand on the same parts.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvatlas.cost.rates_file import read_profile
from kvatlas.errors import InvalidValue, KvatlasError, SettingsError
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.redis.answering_index import AnsweringIndex, open_answering_index
from kvatlas.outliers import OutlierStore
from kvatlas.request import Slo
from kvatlas.reservations import RedisReservations
from kvatlas.settings import RoutingSettings
from kvatlas.store.connection import Store, connected_store, reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas.telemetry import export_metrics
from kvatlas_router.admission.admission import Admission, AdmissionCounters, AdmissionSettings
from kvatlas_router.admission.queue import AdmissionQueue, QueueSettings
from kvatlas_router.disaggregation.pair_booker import PairBooker
from kvatlas_router.outliers.avoidance import Avoidance
from kvatlas_router.outliers.monitor import OutlierMonitor
from kvatlas_router.progress.engine_progress import Probe
from kvatlas_router.progress.monitor import ProgressMonitor
from kvatlas_router.proxy.catalogue import Catalogue
from kvatlas_router.proxy.request_reader import RequestReader
from kvatlas_router.tokens.budget import BudgetedTokenizer, TokenizerBudget
from kvatlas_router.tokens.counters import TokenCounters
from kvatlas_router.tokens.engine_tokenizer import EngineTokenizer
from kvatlas_router.tokens.prompt_reader import PromptSettings
from kvatlas_router.tokens.tokenizer import ThreadedTokenizer, Tokenizer
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient
from kvatlas_router.upstream.small_request import ask_for_a_token
from router_client.chain_cache import ChainCache
from router_client.client import RouterClient
from router_client.decision.index_access import open_overlap_index
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
"""The most that a start waits for this."""
TOKENIZE_S = 5.0
"""How long an engine may take to tokenize a prompt, or to list its models."""
PROBE_S = 600.0
"""A stalled engine may take so long for a probe; it stays stalled meanwhile."""


@dataclass(frozen=True, slots=True)
class RequestRouter:
    """`client` chooses and books, `reader` makes prompts of requests in scopes that `catalogue` knows; `outliers` and
    `progress` know which workers to avoid: those that fail, and those that stand still. `short_calls`: to engines, for what
    takes them no time. `addresses`: where engines may be. `fleet` and `index`: what the store says of workers, for people."""

    client: RouterClient
    reader: RequestReader
    catalogue: Catalogue
    tokens: TokenCounters
    outliers: OutlierMonitor
    progress: ProgressMonitor
    short_calls: EngineClient
    addresses: AddressPolicy
    fleet: FleetStore
    index: AnsweringIndex

    async def warm_up(self) -> None:
        """Connect to the store and read what the first requests need: they would fall open otherwise. Raises nothing: what is
        not there in time is waited for by the requests."""
        try:
            async with asyncio.timeout(WARM_S):
                await self._read_pools()
        except (KvatlasError, *STORE_FAILURES) as error:
            _log.warning("first read of the fleet failed (%s); going on", reason(error))

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
    """Connected, with its counters exported. `near`: does the process listen on loopback, so that engines may be there too?
    `credentials_to`: see `AddressPolicy`.

    Raises SettingsError for a tokenizer that can't be read, and Unreachable or LayoutMismatch if the store can't be used and
    `wait` is off.
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(connected_store(settings.redis, wait=settings.wait, on_wait=_log_wait))
        addresses = _address_policy(settings, credentials_to, near)
        short_calls = await stack.enter_async_context(EngineClient(addresses, TOKENIZE_S))
        tokens = TokenCounters()
        fleet = FleetStore(store)

        async def read_fleet() -> Mapping[str, FleetRecord]:
            records = await fleet.all()
            addresses.update(records.values())
            return records

        catalogue = Catalogue(read_fleet, short_calls, tenant_id=settings.tenant_id)
        await stack.enter_async_context(catalogue)
        tokenizer = await _open_tokenizer(settings, stack, catalogue, short_calls, tokens)
        slo = Slo(ttft_ms=settings.slo_ttft_ms, tpot_ms=settings.slo_tpot_ms)
        session_headers = tuple(name.lower() for name in settings.session_headers)
        prompts = PromptSettings(settings.output_tokens, settings.salt_is_tenant, slo, session_headers)
        reader = RequestReader(catalogue, tokenizer, ChainCache(), prompts)
        index = await open_answering_index(store, wait=settings.wait, on_wait=_log_wait)
        lookups = await stack.enter_async_context(open_overlap_index(store, index, _replica_settings(settings)))
        client = await stack.enter_async_context(_build_client(settings, store, lookups))
        stack.enter_context(export_metrics("router", client.counters))
        stack.enter_context(export_metrics("tokens", tokens))
        stack.enter_context(export_metrics("answers", client.answers.counts))
        outliers = OutlierMonitor(OutlierStore(store), client.router_id, catalogue.members_of)
        outliers.start()
        stack.push_async_callback(outliers.stop)
        stack.enter_context(export_metrics("outliers", outliers.counters))
        stack.enter_context(export_metrics("ejected", outliers))
        probes = await stack.enter_async_context(EngineClient(addresses, PROBE_S))
        progress = _build_progress(catalogue, probes)
        client.answers.stalled_by_pool = progress.stalled_by_pool
        progress.start()
        stack.push_async_callback(progress.stop)
        stack.enter_context(export_metrics("progress", progress.counters))
        yield RequestRouter(client, reader, catalogue, tokens, outliers, progress, short_calls, addresses, fleet, index)


def build_admission(
    parts: RequestRouter, settings: RoutingSettings, counters: AdmissionCounters, *, apart: bool
) -> Admission:
    """Over these parts, as the settings say. `apart`: prefill and decode may be on two workers."""
    pairs = PairBooker(parts.client, parts.catalogue.records, apart=apart)
    avoidance = Avoidance(parts.outliers, parts.catalogue.workers_of, parts.progress.stalled_in)
    queue = AdmissionQueue(QueueSettings(settings.queue_requests, settings.queue_tokens, settings.queue_wait_s))
    headers = settings.tenant_header.lower(), settings.priority_header.lower()
    return Admission(pairs, avoidance, queue, counters, AdmissionSettings(settings.shed, *headers))


def _build_progress(catalogue: Catalogue, client: EngineClient) -> ProgressMonitor:
    async def send_probe(record: FleetRecord) -> Probe:
        endpoint = record.endpoint
        return await ask_for_a_token(client, endpoint.url, catalogue.served_name(endpoint), headers_for(endpoint))

    return ProgressMonitor(catalogue.records, send_probe)


def _address_policy(settings: RoutingSettings, credentials_to: tuple[str, ...], near: bool) -> AddressPolicy:
    try:
        return AddressPolicy(settings.engine_addresses, credentials_to, near=near, access=settings.engine_access)
    except InvalidValue as error:
        raise SettingsError(f"--engine-addresses or --credentials-to: {error}") from error


def _replica_settings(settings: RoutingSettings) -> ReplicaSettings | None:
    if not settings.replica:
        if settings.replica_file is not None:
            raise SettingsError(f"--replica-file is {settings.replica_file}; expected --replica with it")
        return None
    return ReplicaSettings(settings.nats, max_bytes=settings.replica_memory_mib << 20, file=settings.replica_file)


def _build_client(settings: RoutingSettings, store: Store, index: OverlapIndex) -> RouterClient:
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
        reservations=RedisReservations(store),
        store=store,
    )


def _build_selector(settings: RoutingSettings) -> Selector | None:
    labels, allow, deny = settings.select_labels, settings.allow_workers or None, settings.deny_workers
    return Selector(labels, allow, deny) if labels or allow or deny else None


async def _open_tokenizer(
    settings: RoutingSettings,
    stack: AsyncExitStack,
    catalogue: Catalogue,
    client: EngineClient,
    counters: TokenCounters,
) -> BudgetedTokenizer | None:
    chosen: Tokenizer
    if settings.tokenizer == "none":
        return None
    if settings.tokenizer == "engine":
        chosen = EngineTokenizer(client, catalogue.engines_of, settings.tokenizer_deadline_ms / 2_000)
    else:
        from kvatlas_router.tokens.local_tokenizer import LocalTokenizer

        chosen = threads = ThreadedTokenizer(LocalTokenizer.from_folder(settings.tokenizer).prompt_tokens)
        stack.callback(threads.close)
    budget = TokenizerBudget(settings.tokenizer_deadline_ms, most_deadline_ms=settings.most_tokenizer_deadline_ms)
    budgeted = BudgetedTokenizer(chosen, budget, counters)
    stack.push_async_callback(budgeted.aclose)
    return budgeted


def _log_wait(line: str) -> None:
    _log.warning("%s", line)
