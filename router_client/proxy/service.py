"""The proxy as a process: connections to the store and the engines, a tokenizer, a server; until it is cancelled."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import httpx

from kvatlas.addresses import parse_ip
from kvatlas.cost import EngineProfile, QuillcacheProfile
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet.store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.request import Slo
from kvatlas.reservations import RedisReservations
from kvatlas.runtime.http_server import listen, serve, url_of
from kvatlas.settings import ProxySettings
from kvatlas.store.connection import Store, connected_store
from kvatlas.telemetry import export_metrics
from router_client.chain_cache import ChainCache
from router_client.client import RouterClient
from router_client.decision.selector import Selector
from router_client.held_bookings import HeldBookings
from router_client.proxy.answer_relay import AnswerRelay
from router_client.proxy.application import ProxyApplication
from router_client.proxy.catalogue import Catalogue
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.engine_addresses import AddressPolicy, CheckedTransport
from router_client.proxy.exchange import Exchange, ExchangeSettings
from router_client.proxy.request_reader import RequestReader
from router_client.settings import LearningSettings, LimitSettings, RoundRobin, RouterSettings, SloMode
from router_client.tokens.budget import BudgetedTokenizer, TokenizerBudget
from router_client.tokens.counters import TokenCounters
from router_client.tokens.engine_tokenizer import EngineTokenizer
from router_client.tokens.prompt_reader import PromptSettings
from router_client.tokens.tokenizer import ThreadedTokenizer, Tokenizer

_log = logging.getLogger("router_client.proxy")

CONNECT_S = 2.0
TOKENIZE_S = 5.0
"""How long an engine may take to tokenize a prompt, or to list its models."""
CLOSE_S = 5.0
GRACE_S = 5
"""How long running answers may go on after the proxy was asked to stop."""


async def run_proxy(settings: ProxySettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled; `ready` is called once with the base URL, when requests are taken.

    Raises SettingsError for an address that can't be listened on or a tokenizer that can't be read, and Unreachable or
    LayoutMismatch if the store can't be used and `wait` is off.
    """
    listener = listen(settings.host, settings.port, "the router")
    try:
        async with open_proxy(settings) as application, anyio.create_task_group() as tasks:
            await tasks.start(partial(serve, grace_s=GRACE_S), application.asgi, listener)
            if ready is not None:
                ready(url_of(listener))
    finally:
        listener.close()


@asynccontextmanager
async def open_proxy(settings: ProxySettings) -> AsyncIterator[ProxyApplication]:
    """The application with all its parts, for the caller's own server."""
    stack = AsyncExitStack()
    try:
        store = await stack.enter_async_context(connected_store(settings.redis, wait=settings.wait, on_wait=_log_wait))
        addresses = _address_policy(settings)
        engines = await stack.enter_async_context(_engine_client(settings.engine_timeout_s, addresses))
        short_calls = await stack.enter_async_context(_engine_client(TOKENIZE_S, addresses))
        counters, tokens = ProxyCounters(), TokenCounters()
        fleet = FleetStore(store)

        async def read_fleet() -> Mapping[str, FleetRecord]:
            records = await fleet.all()
            addresses.update(records.values())
            return records

        catalogue = Catalogue(read_fleet, short_calls, tenant_id=settings.tenant_id)
        tokenizer = await _open_tokenizer(settings, stack, catalogue, short_calls, tokens)
        slo = Slo(ttft_ms=settings.slo_ttft_ms, tpot_ms=settings.slo_tpot_ms)
        prompts = PromptSettings(settings.output_tokens, settings.salt_is_tenant, slo)
        reader = RequestReader(catalogue, tokenizer, ChainCache(), prompts)
        router = await stack.enter_async_context(await _open_router(settings, store))
        relay = AnswerRelay(engines, counters, addresses, ask_usage=settings.ask_usage)
        attempts = ExchangeSettings(settings.max_attempts, settings.shed)
        exchange = Exchange(router, reader, relay, counters, attempts)
        held = HeldBookings(router, counters, held_s=settings.held_s)
        stack.push_async_callback(held.close)
        stack.enter_context(export_metrics("router", router.counters))
        stack.enter_context(export_metrics("proxy", counters))
        stack.enter_context(export_metrics("tokens", tokens))
        stack.enter_context(export_metrics("answers", router.answers.counts))
        yield ProxyApplication(exchange, held, reader, catalogue, router.answers, tokens, counters, shed=settings.shed)
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await stack.aclose()


async def _open_router(settings: ProxySettings, store: Store) -> RouterClient:
    index = await open_redis_index(store, writer=False, wait=settings.wait, on_wait=_log_wait)
    profile = EngineProfile() if settings.cost_profile == "engine" else QuillcacheProfile()
    return RouterClient(
        index,
        FleetStore(store),
        RouterSettings(
            profile=profile,
            deadline_ms=settings.decision_deadline_ms,
            load_only=settings.load_only,
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


def _build_selector(settings: ProxySettings) -> Selector | None:
    labels, allow, deny = settings.select_labels, settings.allow_workers or None, settings.deny_workers
    return Selector(labels, allow, deny) if labels or allow or deny else None


async def _open_tokenizer(
    settings: ProxySettings,
    stack: AsyncExitStack,
    catalogue: Catalogue,
    client: httpx.AsyncClient,
    counters: TokenCounters,
) -> BudgetedTokenizer | None:
    chosen: Tokenizer
    if settings.tokenizer == "none":
        return None
    if settings.tokenizer == "engine":
        chosen = EngineTokenizer(client, catalogue.engines_of)
    else:
        from router_client.tokens.local_tokenizer import LocalTokenizer

        chosen = threads = ThreadedTokenizer(LocalTokenizer.from_folder(settings.tokenizer).encode)
        stack.callback(threads.close)
    budget = TokenizerBudget(settings.tokenizer_deadline_ms)
    budgeted = BudgetedTokenizer(chosen, budget, counters)
    stack.push_async_callback(budgeted.aclose)
    return budgeted


def _address_policy(settings: ProxySettings) -> AddressPolicy:
    own = parse_ip(settings.host)
    near = own.is_loopback if own is not None else settings.host == "localhost"
    try:
        return AddressPolicy(settings.engine_addresses, settings.credentials_to, near=near)
    except InvalidValue as error:
        raise SettingsError(f"--engine-addresses or --credentials-to: {error}") from error


def _engine_client(timeout_s: float, addresses: AddressPolicy) -> httpx.AsyncClient:
    """Any number of connections, kept open, to addresses that the policy allows. Proxies from the environment are
    ignored: engines are near."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1_024, keepalive_expiry=4.0)
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    transport = CheckedTransport(addresses, httpx.AsyncHTTPTransport(limits=limits, trust_env=False))
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False, follow_redirects=False)


def _log_wait(line: str) -> None:
    _log.warning("%s", line)
