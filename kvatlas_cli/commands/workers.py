"""`kvatlas workers`: the workers that the indexers know."""

import time
from typing import Any

from kvatlas.blocks.digest import Digest
from kvatlas.fleet.records import FleetRecord, to_jsonable
from kvatlas.fleet.store import FleetStore
from kvatlas.index.redis.index import RedisIndex
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import age_text, count_text, print_json, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store, open_index


@with_settings(QuerySettings)
def workers(settings: QuerySettings, as_json: JsonFlag = False) -> None:
    """List the workers: engine, state, blocks held, load, incarnation, age of the last heartbeat."""
    run_query("workers", settings, _workers(settings, as_json))


async def _workers(settings: QuerySettings, as_json: bool) -> None:
    async with connect_store(settings) as store:
        index = await open_index(store, settings)
        records = await FleetStore(store).all()
        blocks = {worker_id: await _count_blocks(index, worker_id) for worker_id in records}
    now_us = time.time_ns() // 1_000
    if as_json:
        print_json([_jsonable(records[worker_id], blocks[worker_id], now_us) for worker_id in sorted(records)])
        return
    print_table(
        count_text(len(records), "worker"),
        (
            "worker",
            "engine",
            "model",
            "state",
            "liveness",
            "blocks",
            "running",
            "waiting",
            "cache",
            "incarnation",
            "age",
        ),
        [_row(records[worker_id], blocks[worker_id], now_us) for worker_id in sorted(records)],
    )


async def _count_blocks(index: RedisIndex, worker_id: str) -> int | None:
    """Residencies of the worker's active holder; None if it has none."""
    words = await index.digest(worker_id)
    return None if words is None else Digest(list(words)).blocks


def _row(record: FleetRecord, blocks: int | None, now_us: int) -> tuple[str, ...]:
    endpoint, load = record.endpoint, record.load
    return (
        endpoint.id,
        endpoint.kind.value,
        endpoint.model_id,
        record.state.value,
        record.liveness.value,
        "-" if blocks is None else str(blocks),
        "-" if load is None else str(load.running_decodes),
        "-" if load is None else str(load.forward_pass.requests_waiting),
        "-" if load is None else f"{load.forward_pass.cache_usage:.0%}",
        str(record.incarnation),
        age_text(max(0, now_us - record.heard_us)) if record.heard_us else "-",
    )


def _jsonable(record: FleetRecord, blocks: int | None, now_us: int) -> dict[str, Any]:
    """The incarnation is text: it has 64 bits, which JSON numbers don't carry."""
    return {
        "worker": record.endpoint.id,
        "kind": record.endpoint.kind.value,
        "state": record.state.value,
        "liveness": record.liveness.value,
        "routable": record.routable,
        "blocks": blocks,
        "load": None if record.load is None else to_jsonable(record.load),
        "incarnation": str(record.incarnation),
        "age_ms": max(0, now_us - record.heard_us) // 1_000 if record.heard_us else None,
        "endpoint": to_jsonable(record.endpoint),
    }
