"""Which models the fleet serves, under which names, and where: from fleet records and from the engines' model lists."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvatlas.errors import Unreachable
from kvatlas.fleet.records import FleetRecord
from kvatlas.identity import DEFAULT_TENANT, Scope
from router_client.decision.fleet_cache import LastKnownRecords
from router_client.tokens.text_request import TextRequest

FLEET_AGE_S = 1.0
NAMES_AGE_S = 30.0
UNKNOWN_AGE_S = 2.0
"""How soon engines are asked again if a request names a model that none of them listed."""

_log = logging.getLogger("router_client.proxy")

Fleet = Callable[[], Awaitable[Mapping[str, FleetRecord]]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model or adapter that a name in a request stands for."""

    model_id: str
    tokenizer_id: str
    adapter_id: str | None = None


@dataclass(slots=True)
class _Known:
    read_at: float | None = None
    """When the last read of the records began; None: none has succeeded."""
    served: Mapping[str, ServedModel] = field(default_factory=dict)
    cards: Sequence[Mapping[str, Any]] = ()
    listed_at: float = float("-inf")


class Catalogue:
    """Keeps what it knew if the store or the engines don't answer. Raises Unreachable if it never knew anything."""

    def __init__(
        self,
        fleet: Fleet,
        client: httpx.AsyncClient,
        *,
        tenant_id: str = DEFAULT_TENANT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller keeps the client, and closes it."""
        self._fleet = fleet
        self._client = client
        self._tenant_id = tenant_id
        self._clock = clock
        self._known = _Known()
        self._last = LastKnownRecords(clock)
        self._reading = asyncio.Lock()
        self._listing = asyncio.Lock()

    async def scope_of(self, name: str | None, tenant_id: str | None = None) -> Scope | None:
        """The identity scope of a request that names this model; None for a name that no engine serves.

        No name stands for the fleet's model, if there is only one.
        """
        served = await self._find(name)
        if served is None:
            return None
        return Scope(served.model_id, served.tokenizer_id, served.adapter_id, tenant_id or self._tenant_id)

    async def engines_of(self, request: TextRequest) -> Sequence[str]:
        """Base URLs of the engines that serve a request's model now."""
        served = await self._find(request.model)
        if served is None:
            return ()
        records = (await self._read_records()).values()
        urls = {r.endpoint.url for r in records if r.routable and r.endpoint.model_id == served.model_id}
        return sorted(urls - {""})

    async def cards(self) -> Sequence[Mapping[str, Any]]:
        """The fleet's models as OpenAI's `/v1/models` lists them: each name once."""
        await self._refresh_names(NAMES_AGE_S)
        if self._known.cards:
            return self._known.cards
        models = sorted({record.endpoint.model_id for record in (await self._read_records()).values()})
        return [{"id": model, "object": "model", "owned_by": "kvatlas"} for model in models]

    async def routable(self) -> int:
        """How many workers may get requests now, as far as known."""
        try:
            return sum(record.routable for record in (await self._read_records()).values())
        except Unreachable:
            return 0

    async def _find(self, name: str | None) -> ServedModel | None:
        records = (await self._read_records()).values()
        pools = {(record.endpoint.model_id, record.endpoint.tokenizer_id) for record in records}
        if name is None:
            return ServedModel(*next(iter(pools))) if len(pools) == 1 else None
        own = sorted(pool for pool in pools if pool[0] == name)
        if own:
            return ServedModel(*own[0])
        await self._refresh_names(NAMES_AGE_S if name in self._known.served else UNKNOWN_AGE_S)
        return self._known.served.get(name)

    async def _read_records(self) -> Mapping[str, FleetRecord]:
        known, last = self._known, self._last
        if known.read_at is not None and (self._reading.locked() or self._clock() - known.read_at < FLEET_AGE_S):
            return last.records
        async with self._reading:
            if known.read_at is not None and self._clock() - known.read_at < FLEET_AGE_S:
                return last.records
            began = self._clock()
            try:
                records = last.update(await self._fleet())
            except Unreachable as error:
                if known.read_at is None:
                    raise
                _log.warning("fleet not read (%s); using the %d workers known last", error, len(last.records))
                records = last.records
            known.read_at = began
            return records

    async def _refresh_names(self, age_s: float) -> None:
        """Ask one engine of each pool for its model list, unless that was done at most `age_s` ago."""
        known = self._known
        if self._clock() - known.listed_at < age_s:
            return
        async with self._listing:
            if self._clock() - known.listed_at < age_s:
                return
            served: dict[str, ServedModel] = {}
            cards: dict[str, Mapping[str, Any]] = {}
            pools: dict[tuple[str, str], list[str]] = {}
            for record in (await self._read_records()).values():
                if record.routable and record.endpoint.url:
                    pool = (record.endpoint.model_id, record.endpoint.tokenizer_id)
                    pools.setdefault(pool, []).append(record.endpoint.url)
            for pool, urls in sorted(pools.items()):
                for card in await self._list_models(urls):
                    name = str(card["id"])
                    adapter = name if card.get("parent") else None
                    served.setdefault(name, ServedModel(*pool, adapter))
                    cards.setdefault(name, card)
            if cards or not pools:
                known.served, known.cards = served, list(cards.values())
            known.listed_at = self._clock()

    async def _list_models(self, urls: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """The model list of the first engine that answers."""
        for url in urls:
            try:
                answer = await self._client.get(f"{url.rstrip('/')}/v1/models")
                data = answer.json()["data"] if answer.status_code == 200 else None
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                _log.debug("%s/v1/models: %s", url, error or type(error).__name__)
                continue
            if isinstance(data, list):
                return [card for card in data if isinstance(card, dict) and card.get("id")]
        return ()
