"""`kvatlas workers`: the workers that the indexers know."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.fleet.records import FleetRecord, to_jsonable
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import RedisIndex
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import age_text, count_text, print_json, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store, open_index
from kvatlas_cli.worker_state import state_word

COLUMNS = (
    "worker",
    "engine",
    "model",
    "state",
    "liveness",
    "blocks",
    "resumable",
    "running",
    "waiting",
    "cache",
    "incarnation",
    "age",
)


@with_settings(QuerySettings)
def workers(settings: QuerySettings, as_json: JsonFlag = False) -> None:
    """List the workers: engine, state, blocks held, load, incarnation, age of the last heartbeat."""
    run_query("workers", settings, _workers(settings, as_json))


async def _workers(settings: QuerySettings, as_json: bool) -> None:
    async with connect_store(settings) as store:
        index = await open_index(store, settings)
        records = await FleetStore(store).all()
        if not as_json:
            print_workers(await read_rows(index, records))
            return
        held = {worker_id: await _count_held(index, worker_id) for worker_id in records}
    now_us = time.time_ns() // 1_000
    print_json([_jsonable(records[worker_id], held[worker_id], now_us) for worker_id in sorted(records)])


async def read_rows(index: RedisIndex, records: Mapping[str, FleetRecord]) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each worker, sorted by name. Raises Unreachable."""
    now_us = time.time_ns() // 1_000
    return [_row(record, await _count_held(index, name), now_us) for name, record in sorted(records.items())]


def print_workers(rows: Sequence[tuple[str, ...]]) -> None:
    """Print what `read_rows` returned."""
    print_table(count_text(len(rows), "worker"), COLUMNS, rows)


class _Held(NamedTuple):
    """The content of a worker's active holder. `resumable`: the number of marked blocks, after which a prompt can resume;
    None for a worker without marks (it can resume after any block), or if unknown (`EngineEndpoint.upper_bound`)."""

    residencies: int
    resumable: int | None


async def _count_held(index: RedisIndex, worker_id: str) -> _Held | None:
    """The content of a worker's active holder; None if there is none."""
    words = await index.digest(worker_id)
    if words is None:
        return None
    tiers, marks = words[:WORDS], words[WORDS:]
    return _Held(Digest(list(tiers)).blocks, marks[0] if marks else None)


def _row(record: FleetRecord, held: _Held | None, now_us: int) -> tuple[str, ...]:
    endpoint, load = record.endpoint, record.load
    return (
        endpoint.id,
        endpoint.kind.value,
        endpoint.model_id,
        state_word(record),
        record.liveness.value,
        "-" if held is None else str(held.residencies),
        _resumable_text(record, held),
        "-" if load is None else str(load.running_decodes),
        "-" if load is None else str(load.forward_pass.requests_waiting),
        "-" if load is None else f"{load.forward_pass.cache_usage:.0%}",
        str(record.incarnation),
        age_text(max(0, now_us - record.heard_us)) if record.heard_us else "-",
    )


def _resumable_text(record: FleetRecord, held: _Held | None) -> str:
    if held is None:
        return "-"
    if held.resumable is not None:
        return str(held.resumable)
    return "at most all" if record.endpoint.upper_bound else "all"


def _jsonable(record: FleetRecord, held: _Held | None, now_us: int) -> dict[str, Any]:
    """A worker as JSON. The incarnation is text, because JSON numbers can't carry its 64 bits."""
    return {
        "worker": record.endpoint.id,
        "kind": record.endpoint.kind.value,
        "state": record.state.value,
        "liveness": record.liveness.value,
        "routable": record.routable,
        "blocks": None if held is None else held.residencies,
        "resumable_blocks": None if held is None else held.resumable,
        "load": None if record.load is None else to_jsonable(record.load),
        "incarnation": str(record.incarnation),
        "age_ms": max(0, now_us - record.heard_us) // 1_000 if record.heard_us else None,
        "endpoint": to_jsonable(record.endpoint),
    }
