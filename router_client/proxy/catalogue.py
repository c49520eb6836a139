"""Which models the fleet serves, under which names, and where: from fleet records, and from what engines list."""

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
from router_client.decision.fleet_cache import LastKnown
from router_client.tokens.text_request import TextRequest

FLEET_AGE_S = 1.0
NAMES_AGE_S = 30.0
UNKNOWN_AGE_S = 2.0
"""How soon engines are asked again where a request names a model that nobody listed."""

_log = logging.getLogger("router_client.proxy")

Fleet = Callable[[], Awaitable[Mapping[str, FleetRecord]]]


@dataclass(frozen=True, slots=True)
class Served:
    """What a name in a request stands for."""

    model_id: str
    tokenizer_id: str
    adapter_id: str | None = None


@dataclass(slots=True)
class _Known:
    read_at: float | None = None
    """when the records were asked for last; None: they never came"""
    served: Mapping[str, Served] = field(default_factory=dict)
    cards: Sequence[Mapping[str, Any]] = ()
    listed_at: float = float("-inf")


class Catalogue:
    """Keeps what it knew where the store or the engines don't answer. Raises Unreachable where it never knew anything."""

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
        self._last = LastKnown(clock)
        self._reading = asyncio.Lock()
        self._listing = asyncio.Lock()

    async def scope_of(self, name: str | None, tenant_id: str | None = None) -> Scope | None:
        """The identity scope of a request that names this model; None for a name that nobody serves.

        No name stands for the fleet's model, where it is one.
        """
        served = await self._served(name)
        if served is None:
            return None
        return Scope(served.model_id, served.tokenizer_id, served.adapter_id, tenant_id or self._tenant_id)

    async def engines_of(self, request: TextRequest) -> Sequence[str]:
        """Base URLs of the engines that serve a request's model now."""
        served = await self._served(request.model)
        if served is None:
            return ()
        records = (await self._records()).values()
        urls = {r.endpoint.url for r in records if r.routable and r.endpoint.model_id == served.model_id}
        return sorted(urls - {""})

    async def cards(self) -> Sequence[Mapping[str, Any]]:
        """The fleet's models as OpenAI's `/v1/models` lists them: each name once."""
        await self._names(NAMES_AGE_S)
        if self._known.cards:
            return self._known.cards
        models = sorted({record.endpoint.model_id for record in (await self._records()).values()})
        return [{"id": model, "object": "model", "owned_by": "kvatlas"} for model in models]

    async def routable(self) -> int:
        """How many workers may get requests now, as far as is known."""
        try:
            return sum(record.routable for record in (await self._records()).values())
        except Unreachable:
            return 0

    async def _served(self, name: str | None) -> Served | None:
        records = (await self._records()).values()
        pools = {(record.endpoint.model_id, record.endpoint.tokenizer_id) for record in records}
        if name is None:
            return Served(*next(iter(pools))) if len(pools) == 1 else None
        own = sorted(pool for pool in pools if pool[0] == name)
        if own:
            return Served(*own[0])
        await self._names(NAMES_AGE_S if name in self._known.served else UNKNOWN_AGE_S)
        return self._known.served.get(name)

    async def _records(self) -> Mapping[str, FleetRecord]:
        known, last = self._known, self._last
        if known.read_at is not None and (self._reading.locked() or self._clock() - known.read_at < FLEET_AGE_S):
            return last.records
        async with self._reading:
            if known.read_at is not None and self._clock() - known.read_at < FLEET_AGE_S:
                return last.records
            asked_at = self._clock()
            try:
                records = last.after(await self._fleet())
            except Unreachable as error:
                if known.read_at is None:
                    raise
                _log.warning("%s; going on with %d workers as last known", error, len(last.records))
                records = last.records
            known.read_at = asked_at
            return records

    async def _names(self, age_s: float) -> None:
        """Ask one engine of each pool what it lists, unless that was done at most `age_s` ago."""
        known = self._known
        if self._clock() - known.listed_at < age_s:
            return
        async with self._listing:
            if self._clock() - known.listed_at < age_s:
                return
            served: dict[str, Served] = {}
            cards: dict[str, Mapping[str, Any]] = {}
            pools: dict[tuple[str, str], list[str]] = {}
            for record in (await self._records()).values():
                if record.routable and record.endpoint.url:
                    pool = (record.endpoint.model_id, record.endpoint.tokenizer_id)
                    pools.setdefault(pool, []).append(record.endpoint.url)
            for pool, urls in sorted(pools.items()):
                for card in await self._listed(urls):
                    name = str(card["id"])
                    adapter = name if card.get("parent") else None
                    served.setdefault(name, Served(*pool, adapter))
                    cards.setdefault(name, card)
            if cards or not pools:
                known.served, known.cards = served, list(cards.values())
            known.listed_at = self._clock()

    async def _listed(self, urls: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """What the first engine that answers lists."""
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
