"""`kvatlas layout`: lists the layouts of a store, switches to another one, and deletes one.

A layout is filled by its own indexers (`kvatlas indexer --layout N`), next to the one that answers.
"""

from typing import NamedTuple

import anyio

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import Liveness
from kvatlas.fleet_store.fleet_store import FleetStore, leases_key, members_key
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.layout import (
    Layout,
    delete_layout,
    layout_errors,
    read_answering,
    read_layout,
    read_numbers,
    switch_layout,
)
from kvatlas.settings import LayoutSettings
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas_cli.doctor.indexers import read_indexers
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_notice, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store

POLL_S = 0.2
NAMED_WORKERS = 5


class LayoutState(NamedTuple):
    """One layout. `workers`: number of workers that it answers for; `blocks`: residencies that it holds."""

    layout: Layout
    answers: bool
    indexers: int
    workers: int
    blocks: int


@with_settings(LayoutSettings)
def layout(settings: LayoutSettings, as_json: JsonFlag = False) -> None:
    """List the store's layouts, switch to another one that is filled, or delete one."""
    run_query("layout", settings, _layout(settings, as_json))


async def _layout(settings: LayoutSettings, as_json: bool) -> None:
    async with connect_store(settings) as store:
        with layout_errors(store):
            if settings.answer is not None:
                await answer_with(store, settings.answer, settings.deadline_s)
                print_notice(f"layout {settings.answer} answers now; routers read it within 2 s")
            if settings.delete is not None:
                deleted = await delete(store, settings.delete)
                print_notice(f"layout {settings.delete} is deleted: {count_text(deleted, 'key')}")
            states = await read_states(store)
    if as_json:
        print_json([_jsonable(state) for state in states])
        return
    print_table(
        count_text(len(states), "layout"),
        ("layout", "answers", "partitions", "shards", "indexers", "workers", "blocks"),
        [_row(state) for state in states],
    )


async def answer_with(store: Store, number: int, deadline_s: float) -> None:
    """Switch to this layout once it is up to date with all workers that routers see. Raises InvalidValue if the layout does
    not exist, has no indexers, or is not up to date by the deadline."""
    wanted = await _index(store, number)
    before = await read_answering(store)
    if before == number:
        return
    if not await _count_indexers(store, number):
        raise InvalidValue(f"layout {number} has no indexer; start `kvatlas indexer --layout {number}` first")
    present = await _index(store, before or 0)
    behind = await _workers_of(store, present)
    with anyio.move_on_after(deadline_s):
        while behind:
            behind = {
                id: record for id, record in behind.items() if not _is_up_to_date(await wanted.record(id), record)
            }
            if behind:
                await anyio.sleep(POLL_S)
                now = await _workers_of(store, present)
                behind = {id: record for id, record in behind.items() if id in now}
    if behind:
        names = ", ".join(sorted(behind)[:NAMED_WORKERS]) + (", ..." if len(behind) > NAMED_WORKERS else "")
        line = f"layout {number} is not up to date with {count_text(len(behind), 'worker')} after {deadline_s:g} s: {names}"
        raise InvalidValue(f"{line}; layout {before} keeps answering")
    await switch_layout(store, number)


async def delete(store: Store, number: int) -> int:
    """Delete a layout that does not answer, and return the number of deleted keys. Raises InvalidValue if it answers or
    still has indexers."""
    if number == await read_answering(store):
        raise InvalidValue(f"layout {number} answers; let another one answer first (`kvatlas layout --answer N`)")
    if indexers := await _count_indexers(store, number):
        raise InvalidValue(
            f"{count_text(indexers, 'indexer')} of layout {number} still running; stop all of them first"
        )
    deleted = await (await _index(store, number)).unlink()
    for key in (members_key(number), leases_key(number)):
        await store.client.unlink(key)
    await delete_layout(store, number)
    return deleted


async def read_states(store: Store) -> list[LayoutState]:
    answering = await read_answering(store)
    states = []
    for number in await read_numbers(store):
        index = await _index(store, number)
        records = [record for shard in range(index.shards) for record in await index.records(shard)]
        states.append(
            LayoutState(
                index.layout,
                number == answering,
                await _count_indexers(store, number),
                sum(record.answering for record in records),
                await index.length(),
            )
        )
    return states


async def _index(store: Store, number: int) -> RedisIndex:
    if await read_layout(store, number) is None:
        raise InvalidValue(f"{store.name}: it has no layout {number}; start `kvatlas indexer --layout {number}` first")
    return await open_redis_index(store, number=number, writer=False)


async def _workers_of(store: Store, index: RedisIndex) -> dict[str, WorkerRecord]:
    """The live workers that answer in this layout; no snapshot can come from any other worker."""
    fleet = await FleetStore(store).all()
    alive = {worker_id for worker_id, record in fleet.items() if record.liveness is Liveness.ALIVE}
    records = [record for shard in range(index.shards) for record in await index.records(shard)]
    return {record.worker_id: record for record in records if record.answering and record.worker_id in alive}


def _is_up_to_date(found: WorkerRecord | None, present: WorkerRecord) -> bool:
    """True if a layout answers for the worker with everything that the current one had applied."""
    if found is None or not found.answering or found.loading or found.closed:
        return False
    return (found.incarnation, found.seq) >= (present.incarnation, present.seq)


async def _count_indexers(store: Store, number: int) -> int:
    members, _ = await read_indexers(store, await store_time_us(store), number)
    return len(members)


def _row(state: LayoutState) -> tuple[str, ...]:
    found = state.layout
    counts = (found.number, found.partitions, found.shards, state.indexers, state.workers, state.blocks)
    number, *rest = (f"{count:,}" for count in counts)
    return number, "yes" if state.answers else "no", *rest


def _jsonable(state: LayoutState) -> dict[str, object]:
    found = state.layout
    return {
        "layout": found.number,
        "answers": state.answers,
        "partitions": found.partitions,
        "shards": found.shards,
        "publishers": [found.partitions, *found.publishers],
        "indexers": state.indexers,
        "workers": state.workers,
        "blocks": state.blocks,
    }
