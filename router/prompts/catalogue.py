"""The models that the fleet serves, with their names and workers, according to fleet records and the engines' model
lists."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineEndpoint, EngineKind, FleetRecord
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.upstream.engine_client import EngineClient
from kvatlas_router.upstream.model_lists import LIST_AGE_S, Card, ModelLists, merge_cards
from router_client.fleet_cache import LastKnownRecords

FLEET_AGE_S = 1.0
UNKNOWN_AGE_S = 2.0
"""Minimum interval between queries to the engines about a model that none of them has listed."""
LOOK_AGAIN_S = 0.1
"""Minimum interval between reads of the fleet for such a request."""
LOOK_S = 1.0
"""Limit on the duration of that read."""
MOST_TENANTS = 1_024
"""Number of tenants about which something is remembered. It is limited because clients may name any tenant."""
GONE_S = 3_600.0
"""How long a model keeps its name after its last worker has gone: requests for it find no worker and may be retried, while a
name that doesn't exist is a permanent error."""

_log = logging.getLogger("kvatlas_router.proxy")

Fleet = Callable[[], Awaitable[Mapping[str, FleetRecord]]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model or adapter that a name in a request stands for."""

    model_id: str
    tokenizer_id: str
    adapter_id: str | None = None


class Catalogue:
    """Keeps what it knows if the store or the engines don't answer. Once it knows anything, requests never wait for
    either; before that, it raises Unreachable.

    Enter it (`async with`) to poll the engines in the background; otherwise they are asked only about unknown names.

    `seen_by`: a proven tenant, which only sees the models of workers that may see its prompts; None: all models.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: EngineClient,
        *,
        tenant_id: str = DEFAULT_TENANT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tenant_id`: used for requests that prove no tenant. The caller owns the client and closes it."""
        self._fleet = fleet
        self.tenant_id = tenant_id
        self._clock = clock
        self._lists = ModelLists(client, clock)
        self._last = LastKnownRecords(clock)
        self._read_at: float | None = None
        self._read: asyncio.Task[None] | None = None
        self._derived_from: tuple[Mapping[str, FleetRecord] | None, int] = None, 0
        """The records, and the version of the lists, from which the next three are derived."""
        self._served: dict[tuple[str | None, str | None], ServedModel] = {}
        self._remembered: dict[tuple[str, str | None], tuple[ServedModel, float]] = {}
        """What each name stood for, and when it was last known; the oldest first."""
        self._unfit: dict[tuple[ServedModel, str], Mapping[str, str]] = {}
        self._asked: dict[tuple[Scope, str | None], Sequence[str]] = {}
        self._kinds: dict[str, EngineKind] = {}
        self._kinds_of: object = None
        self._task = BackgroundTask(self._keep_asking, "kvatlas model lists")

    async def __aenter__(self) -> "Catalogue":
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.stop()
        if self._read is not None:
            self._read.cancel()
            await asyncio.gather(self._read, return_exceptions=True)

    async def scope_of(
        self, name: str | None, tenant_id: str | None = None, *, seen_by: str | None = None
    ) -> Scope | None:
        """The identity scope of a request that names this model; None if no engine serves it now or has done so within GONE_S.
        Without a name, the scope of the fleet's only model, if there is just one."""
        served = await self._find(name, seen_by)
        if name is not None:
            served = self._remember((name, seen_by), served)
        if served is None:
            return None
        return _scope(served.model_id, served.tokenizer_id, served.adapter_id, tenant_id or self.tenant_id)

    async def unfit_for(self, name: str | None, *, seen_by: str | None = None) -> Mapping[str, str]:
        """Workers in the name's pool that don't serve it, each with the reason; empty if none is known to serve it."""
        served = await self._find(name, seen_by)
        return {} if name is None or served is None else self._unfit_for(served, name)

    async def engines_of(self, request: TextRequest) -> Sequence[str]:
        """Base URLs, without a slash at the end, of the engines that serve a request's model in its scope now, and may see its
        tenant's prompts; empty while its scope is not known."""
        await self._read_records()
        scope, records = request.scope, self._current()
        if scope is None:
            return ()
        key = scope, request.model
        if key not in self._asked:
            pool_id = scope.pool_id
            served = ServedModel(scope.model_id, scope.tokenizer_id, scope.adapter_id)
            unfit = {} if request.model is None else self._unfit_for(served, request.model)
            urls = {
                record.endpoint.url.rstrip("/")
                for id, record in records.items()
                if record.routable
                and record.endpoint.pool_id == pool_id
                and id not in unfit
                and record.may_see(scope.tenant_id)
            }
            self._asked[key] = sorted(urls - {""})
        return self._asked[key]

    def served_name(self, endpoint: EngineEndpoint) -> str:
        """The name under which a worker's engine serves its model, if the engine listed one; otherwise the model's
        id."""
        cards = self._lists.cards_of(endpoint.url) or {}
        if endpoint.model_id in cards:
            return endpoint.model_id
        return next((name for name, card in cards.items() if not card.get("parent")), endpoint.model_id)

    async def cards(self, *, seen_by: str | None = None) -> Sequence[Card]:
        """The fleet's models in the form of OpenAI's `/v1/models`, with each name once."""
        records = _seen_by(seen_by, (await self._read_records()).values())
        urls = {record.endpoint.url for record in records if record.routable} - {""}
        if urls and all(self._lists.cards_of(url) is None for url in urls):
            await self._lists.refresh(self._urls, UNKNOWN_AGE_S)
        listed = merge_cards([cards for url in sorted(urls) if (cards := self._lists.cards_of(url)) is not None])
        if listed:
            return list(listed.values())
        models = sorted({record.endpoint.model_id for record in records})
        return [{"id": model, "object": "model", "created": 0, "owned_by": "kvatlas"} for model in models]

    async def card(self, name: str, *, seen_by: str | None = None) -> Card | None:
        """A model's card; None for a name that no engine serves."""
        served = await self._find(name, seen_by)
        found = next((card for card in await self.cards(seen_by=seen_by) if card["id"] == name), None)
        if found is None and served is not None:
            return {"id": name, "object": "model", "created": 0, "owned_by": "kvatlas"}
        return found

    async def records(self) -> Mapping[str, FleetRecord]:
        """The fleet's workers by id, as recently read. The object stays the same until they are read again."""
        return await self._read_records()

    @property
    def known_records(self) -> Mapping[str, FleetRecord]:
        """The records that were read last, without waiting; see `records`."""
        return self._last.records

    async def routable(self) -> int:
        """Number of workers that are known to be able to take requests now."""
        try:
            return sum(record.routable for record in (await self._read_records()).values())
        except Unreachable:
            return 0

    async def workers_of(self, scope: Scope) -> Mapping[str, FleetRecord]:
        """The workers of a scope's pool that may get requests now."""
        pool_id = scope.pool_id
        records = (await self._read_records()).items()
        return {id: record for id, record in records if record.routable and record.endpoint.pool_id == pool_id}

    async def kind_of(self, scope: Scope) -> EngineKind:
        """The engine kind of a scope's pool: SGLang if all of its engines are SGLang; otherwise vLLM, whose API other
        engines follow."""
        records = await self._read_records()
        if self._kinds_of is not records:
            self._kinds_of = records
            found: dict[str, set[EngineKind]] = {}
            for record in records.values():
                found.setdefault(record.endpoint.pool_id, set()).add(record.endpoint.kind)
            self._kinds = {id: EngineKind.SGLANG for id, kinds in found.items() if kinds == {EngineKind.SGLANG}}
        return self._kinds.get(scope.pool_id, EngineKind.VLLM)

    async def workers_for(self, name: str | None, *, seen_by: str | None = None) -> Collection[str] | None:
        """Workers that serve a name, including those that get no requests now; None if there is no name or the name is
        unknown."""
        scope = await self.scope_of(name, seen_by=seen_by) if name is not None else None
        if scope is None:
            return None
        return set(await self.members_of(scope.pool_id)) - (await self.unfit_for(name, seen_by=seen_by)).keys()

    async def members_of(self, pool_id: str) -> Collection[str]:
        """The workers of a pool, including those that get no requests now."""
        return {id for id, record in (await self._read_records()).items() if record.endpoint.pool_id == pool_id}

    async def knows_pool(self, scope: Scope, *, seen_by: str | None = None) -> bool:
        """True if the fleet has any worker in this scope's pool."""
        records = _seen_by(seen_by, (await self._read_records()).values())
        return any(record.endpoint.pool_id == scope.pool_id for record in records)

    async def forget_name(self, worker_id: str, name: str) -> None:
        """Forget that the worker's engine serves this name, since it refused a request for it."""
        record = (await self._read_records()).get(worker_id)
        if record is not None:
            self._lists.remove(record.endpoint.url, name)

    # ------------------------------------------------------------ names

    async def _find(self, name: str | None, seen_by: str | None = None) -> ServedModel | None:
        await self._read_records()
        found = self._find_known(name, seen_by)
        if found is None and await self._look_again():
            found = self._find_known(name, seen_by)
        if found is None and name is not None:
            await self._lists.refresh(self._urls, UNKNOWN_AGE_S)
            found = self._find_known(name, seen_by)
        return found

    def _remember(self, key: tuple[str, str | None], served: ServedModel | None) -> ServedModel | None:
        """The model that the name stands for, or stood for within the last GONE_S unless its pool has engines that are
        up."""
        if served is None:
            known, at = self._remembered.get(key, (None, 0.0))
            return known if self._clock() - at <= GONE_S and not self._is_served(known) else None
        self._remembered.pop(key, None)
        self._remembered[key] = served, self._clock()
        if len(self._remembered) > MOST_TENANTS:
            del self._remembered[next(iter(self._remembered))]
        return served

    def _is_served(self, model: ServedModel | None) -> bool:
        """True if the pool has engines that are up. They have unloaded any model that they don't list."""
        pools = {(one.endpoint.model_id, one.endpoint.tokenizer_id) for one in self._current().values() if one.routable}
        return model is not None and (model.model_id, model.tokenizer_id) in pools

    def _find_known(self, name: str | None, seen_by: str | None) -> ServedModel | None:
        records, key = self._current().values(), (name, seen_by)
        if (known := self._served.get(key)) is None:
            known = self._find_among(name, _seen_by(seen_by, records))
            if known is not None:
                self._served[key] = known
        return known

    def _find_among(self, name: str | None, records: Collection[FleetRecord]) -> ServedModel | None:
        pools = {(record.endpoint.model_id, record.endpoint.tokenizer_id) for record in records}
        if name is None:
            return ServedModel(*next(iter(pools))) if len(pools) == 1 else None
        own = sorted(pool for pool in pools if pool[0] == name)
        if own:
            return ServedModel(*own[0])
        return self._find_listed(name, records)

    def _find_listed(self, name: str, records: Iterable[FleetRecord]) -> ServedModel | None:
        found = []
        for record in records:
            endpoint = record.endpoint
            cards = (self._lists.cards_of(endpoint.url) or {}) if record.routable else {}
            listed = _listed_name(name, cards) if endpoint.kind is EngineKind.SGLANG else name
            if (card := cards.get(listed)) is not None:
                adapter_id = listed if card.get("parent") else None
                found.append((endpoint.model_id, endpoint.tokenizer_id, adapter_id))
        return ServedModel(*min(found, key=lambda one: one[:2])) if found else None

    def _unfit_for(self, served: ServedModel, name: str) -> Mapping[str, str]:
        records, key = self._current(), (served, name)
        if key not in self._unfit:
            self._unfit[key] = self._find_unfit(served, name, records)
        return self._unfit[key]

    def _find_unfit(self, served: ServedModel, name: str, records: Mapping[str, FleetRecord]) -> Mapping[str, str]:
        unfit: dict[str, str] = {}
        fit = False
        for worker_id, record in records.items():
            endpoint = record.endpoint
            if not record.routable or (endpoint.model_id, endpoint.tokenizer_id) != (
                served.model_id,
                served.tokenizer_id,
            ):
                continue
            cards = self._lists.cards_of(endpoint.url)
            if cards is None and served.model_id == name:
                continue  # its record says that it serves the model
            if cards is not None and (name in cards or served.adapter_id in cards):
                fit = True
            else:
                unfit[worker_id] = f"it does not serve {name:.80}"
        return unfit if fit else {}

    async def _urls(self) -> set[str]:
        return {r.endpoint.url for r in (await self._read_records()).values() if r.routable} - {""}

    async def _keep_asking(self) -> None:
        while self._task.running:
            try:
                await self._lists.refresh(self._urls, 0.0)
            except STORE_FAILURES as error:
                _log.debug("model lists were not read: %s", error)
            await asyncio.sleep(LIST_AGE_S)

    # ------------------------------------------------------------ records

    def _current(self) -> Mapping[str, FleetRecord]:
        """The records that were read last. Anything that was derived from older records or lists is forgotten."""
        records, (of, version) = self._last.records, self._derived_from
        if of is not records or version != self._lists.version or len(self._asked) + len(self._served) > MOST_TENANTS:
            self._derived_from = records, self._lists.version
            self._served, self._unfit, self._asked = {}, {}, {}
        return records

    async def _read_records(self) -> Mapping[str, FleetRecord]:
        """The records that were read last; if they are old, they are read again in the background. Waits only for the
        first read."""
        if self._read_at is not None and self._clock() - self._read_at < FLEET_AGE_S:
            return self._last.records
        read = self._start_read()
        if self._read_at is None:
            await asyncio.shield(read)
        return self._last.records

    async def _look_again(self) -> bool:
        """Read the records again before calling a name unknown. Returns False if they are recent, or if the store is
        slow."""
        if self._read_at is not None and self._clock() - self._read_at < LOOK_AGAIN_S:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                await asyncio.shield(self._start_read())
        except STORE_FAILURES:
            return False
        return True

    def _start_read(self) -> asyncio.Task[None]:
        if self._read is None:
            self._read = asyncio.create_task(self._read_again(), name="kvatlas fleet records")
            self._read.add_done_callback(self._discard_read)
        return self._read

    async def _read_again(self) -> None:
        began = self._clock()
        try:
            records = (await self._fleet()).items()
            self._last.update({id: record for id, record in records if not record.endpoint.is_store})
        except STORE_FAILURES as error:
            if self._read_at is None:
                raise
            _log.warning(
                "could not read the fleet (%s); using the %d workers known from earlier reads",
                error,
                len(self._last.records),
            )
        self._read_at = began

    def _discard_read(self, read: asyncio.Task[None]) -> None:
        self._read = None
        if not read.cancelled():
            read.exception()  # otherwise asyncio logs that it was never retrieved


_scope = lru_cache(maxsize=MOST_TENANTS)(Scope)
"""Makes a scope, or returns it as last made."""


def _seen_by(tenant_id: str | None, records: Collection[FleetRecord]) -> Collection[FleetRecord]:
    return records if tenant_id is None else [record for record in records if record.may_see(tenant_id)]


def _listed_name(name: str, cards: Mapping[str, Card]) -> str:
    """The listed name that SGLang takes `base:adapter` to mean: the adapter's if the engine lists both; otherwise the
    name itself."""
    bases = (base for base in cards if name.startswith(f"{base}:"))
    return next((adapter for base in bases if (adapter := name[len(base) + 1 :]) in cards), name)
