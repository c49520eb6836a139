"""The parts that read requests and look their prompts up: the store, the fleet's models, a tokenizer, the index.

Shared by the routers and the index server. Nothing here writes to the store.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.redis.answering_index import AnsweringIndex, open_answering_index
from kvatlas.settings.lookup import LookupSettings
from kvatlas.store.connection import Store, connected_store
from kvatlas.telemetry import export_metrics
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader
from kvatlas_router.tokens.budget import BudgetedTokenizer, TokenizerBudget
from kvatlas_router.tokens.counters import TokenCounters
from kvatlas_router.tokens.engine_tokenizer import EngineTokenizer
from kvatlas_router.tokens.prompt_reader import PromptSettings
from kvatlas_router.tokens.tokenizer import ThreadedTokenizer, Tokenizer
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient
from router_client.decision.index_source import open_overlap_index
from router_client.pricing.overlap import OverlapIndex

INLINE_LETTERS = 2_048
"""A local tokenizer takes about a millisecond for this many letters."""
TOKENIZE_S = 5.0
"""Limit on the time that an engine takes to tokenize a prompt or list its models."""

_log = logging.getLogger("kvatlas_router.proxy")


@dataclass(frozen=True, slots=True)
class RequestSource:
    """`reader` turns requests into prompts in the scopes of `catalogue`. `lookups` looks them up in the store's `index`, or in
    a local copy of the index. `short_calls`: client for quick engine calls. `addresses`: which addresses engines may have.
    `fleet`: the store's records of workers."""

    store: Store
    reader: RequestReader
    catalogue: Catalogue
    tokens: TokenCounters
    short_calls: EngineClient
    addresses: AddressPolicy
    fleet: FleetStore
    index: AnsweringIndex
    lookups: OverlapIndex


@asynccontextmanager
async def open_request_source(
    settings: LookupSettings, near: bool, prompts: PromptSettings, credentials_to: tuple[str, ...] = ()
) -> AsyncIterator[RequestSource]:
    """Open the parts, and export the tokenizer's counters. `near`: this process listens on loopback, so engines may be on
    loopback too. `credentials_to`: see `AddressPolicy`.

    Raises SettingsError for a tokenizer that can't be read, or Unreachable or LayoutMismatch if the store can't be used and
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
        reader = RequestReader(catalogue, tokenizer, prompts)
        index = await open_answering_index(store, wait=settings.wait, on_wait=_log_wait)
        lookups = await stack.enter_async_context(open_overlap_index(store, index, _replica_settings(settings)))
        stack.enter_context(export_metrics("tokens", tokens))
        yield RequestSource(store, reader, catalogue, tokens, short_calls, addresses, fleet, index, lookups)


def _address_policy(settings: LookupSettings, credentials_to: tuple[str, ...], near: bool) -> AddressPolicy:
    try:
        return AddressPolicy(settings.engine_addresses, credentials_to, near=near, access=settings.engine_access)
    except InvalidValue as error:
        raise SettingsError(f"--engine-addresses or --credentials-to: {error}") from error


def _replica_settings(settings: LookupSettings) -> ReplicaSettings | None:
    if not settings.replica:
        if settings.replica_file is not None:
            raise SettingsError(f"--replica-file is {settings.replica_file}; it requires --replica")
        return None
    return ReplicaSettings(settings.nats, max_bytes=settings.replica_memory_mib << 20, file=settings.replica_file)


async def _open_tokenizer(
    settings: LookupSettings,
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

        local = LocalTokenizer.from_folder(settings.tokenizer)
        chosen = threads = ThreadedTokenizer(local.prompt_tokens, inline_letters=INLINE_LETTERS)
        stack.callback(threads.close)
    budget = TokenizerBudget(settings.tokenizer_deadline_ms, most_deadline_ms=settings.most_tokenizer_deadline_ms)
    budgeted = BudgetedTokenizer(chosen, budget, counters)
    stack.push_async_callback(budgeted.aclose)
    return budgeted


def _log_wait(line: str) -> None:
    _log.warning("%s", line)
