"""Workers that were retired within the last hour; they show which workers are missing.

    kva:{fleet}:departed   HASH  worker id -> packed Departure

The owner of a worker's partition writes this entry when it retires the worker, and deletes it when it hears from the worker
again.
"""

from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineState, FleetRecord, WireRecord, WorkerId
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas.validation import Count, Name

DEPARTED = "kva:{fleet}:departed"
KEEP_S = 3600
MOST = 1024
"""Maximum number of departures in the store. Above it, new ones are not recorded: this number is enough to show that a fleet
was switched off."""


class Departure(WireRecord):
    """A worker that was retired. `heard_us`: when its last heartbeat came, by its indexer's clock; `at_us`: when it was
    retired, by the store's clock. `drained`: it had announced its departure."""

    worker_id: WorkerId
    model_id: Name
    url: Annotated[str, Field(max_length=2048)] = ""
    heard_us: Count = 0
    at_us: Count
    drained: bool = False


async def record_departure(store: Store, record: FleetRecord) -> None:
    """Record that a worker is being retired. Raises Unreachable."""
    departure = Departure(
        worker_id=record.endpoint.id,
        model_id=record.endpoint.model_id,
        url=record.endpoint.url,
        heard_us=record.heard_us,
        at_us=await store_time_us(store),
        drained=record.state is EngineState.DRAINING,
    )
    if await store.ask(store.client.hlen(DEPARTED)) < MOST:
        await store.ask(store.client.hset(DEPARTED, record.endpoint.id, departure.pack()))
    await store.ask(store.client.pexpire(DEPARTED, KEEP_S * 1_000))


async def forget_departures(store: Store, worker_ids: Collection[str]) -> None:
    """Remove the departures of workers that are back. Raises Unreachable."""
    if worker_ids:
        await store.ask(store.client.hdel(DEPARTED, *worker_ids))


async def read_departures(store: Store, now_us: int) -> dict[str, Departure]:
    """Departures within the hour before `now_us` (the store's time). Raises Unreachable."""
    found: dict[str, Departure] = {}
    for packed in (await store.ask(store.client.hgetall(DEPARTED))).values():
        try:
            one = Departure.unpack(packed)
        except InvalidValue:
            continue  # written by a different version
        if one.at_us > now_us - KEEP_S * 1_000_000:
            found[one.worker_id] = one
    return found
