"""Finds the worker that keeps an object (`object_use.py`); shared by the fleet's routers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from kvatlas.errors import InvalidValue, KvatlasError, Unreachable
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas_router.engine_objects.known_holders import KnownHolders
from kvatlas_router.engine_objects.object_use import ObjectUse
from router_client.decision.selector import Selector
from router_client.prompt import Prompt

MOST_KNOWN = 100_000
"""Number of objects, from all tenants, that one router keeps in memory."""
CALL_S = 1.0

_log = logging.getLogger("kvatlas_router.proxy")


class ObjectUnknown(KvatlasError):
    """No engine is known to have the object that a request names, or the engine that had it is gone."""


class ObjectHolders:
    """Safe to share between tasks of one event loop. Bounded, both here and in the store: each tenant has its share, and its
    oldest objects are forgotten first."""

    def __init__(self, fleet: FleetStore, records: Callable[[], Awaitable[Mapping[str, FleetRecord]]]) -> None:
        self._fleet = fleet
        self._records = records
        self._known = KnownHolders(MOST_KNOWN)

    async def find(
        self, use: ObjectUse, workers: Iterable[str] | None = None, tenant_id: str | None = None
    ) -> FleetRecord | None:
        """The worker that a request must go to; None: any worker. `workers`: the candidates; None: all workers. `tenant_id`:
        the proven tenant, who can reach only its own objects; None: there is only one tenant.

        Raises ObjectUnknown if no worker in the fleet is known to have the object; InvalidValue if the request names objects
        on several workers or on one that is not a candidate, or would list the objects of several workers or tenants; or
        Unreachable if the holder can't take requests now, or can't be looked up because the store does not answer.
        """
        if not use.ids and not use.lists:
            return None
        records = await self._records()
        among = [id for id in (records if workers is None else workers) if id in records]
        if use.lists and tenant_id is not None:
            raise InvalidValue("this would list the objects of all tenants; ask for an object by its id")
        if len(among) == 1 and tenant_id is None:
            return records[among[0]]
        if use.lists:
            raise InvalidValue(
                f"this would list the objects of only one of {len(among)} engines; ask for an object by its id"
            )
        holders = {await self._holder(id, tenant_id): id for id in use.ids}
        if len(holders) > 1:
            where = ", ".join(f"{id[:80]} on {worker_id}" for worker_id, id in holders.items())
            raise InvalidValue(f"no engine has all objects that the request names: {where}")
        for worker_id, id in holders.items():
            record = records.get(worker_id)
            if record is None:
                raise ObjectUnknown(f"{id[:80]} was kept by worker {worker_id}, which is gone; make it again")
            if worker_id not in among:
                raise InvalidValue(
                    f"{id[:80]} is kept by worker {worker_id}, which does not serve this request's model"
                )
            if not record.routable:
                raise Unreachable(f"{id[:80]} is kept by worker {worker_id}, which can't take requests now")
            return record
        return None

    async def record(self, ids: Iterable[str], worker_id: str, tenant_id: str | None = None) -> None:
        """Record that the worker's engine keeps these objects for this tenant. Waits up to CALL_S for the store, because
        the next request for an object may reach another router."""
        new = {id: worker_id for id in ids if self._known.find(tenant_id, id) != worker_id}
        if not new:
            return
        self._known.add(tenant_id, new)
        try:
            async with asyncio.timeout(CALL_S):
                await self._fleet.put_objects(new, tenant_id)
        except STORE_FAILURES as error:
            _log.warning(
                "could not record in the store that worker %s keeps %s, so other routers may not find it: %s",
                worker_id,
                next(iter(new)),
                reason(error),
            )

    async def _holder(self, id: str, tenant_id: str | None) -> str:
        if (known := self._known.find(tenant_id, id)) is not None:
            return known
        try:
            async with asyncio.timeout(CALL_S):
                found = await self._fleet.find_object(id, tenant_id)
        except STORE_FAILURES as error:
            raise Unreachable(f"{id[:80]}: can't look up which engine has it ({reason(error)})") from error
        if found is None:
            raise ObjectUnknown(f"{id[:80]}: no engine is known to have it; it stays on the engine that made it")
        self._known.add(tenant_id, {id: found})
        return found


def only_for(prompt: Prompt, holder: FleetRecord) -> Prompt:
    """The prompt, restricted to this worker."""
    return replace(prompt, select=replace(prompt.select or Selector(), allow=frozenset((holder.endpoint.id,))))
