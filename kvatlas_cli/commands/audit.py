"""`kvatlas audit`: compares every publisher's ledger with the index."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvatlas.bus.connection import connect_nats
from kvatlas.fleet.records import EngineState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.ledger_audit import Difference, WorkerAudit, audit_workers
from kvatlas_cli.output import count_text, print_json, print_notice, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import check_worker_known, connect_store, open_index


@with_settings(QuerySettings)
def audit(
    settings: QuerySettings,
    worker: Annotated[str | None, typer.Option(help="Audit only this worker.")] = None,
    deadline: Annotated[
        float, typer.Option(min=0.0, help="Seconds for the index to catch up with the publishers' messages.")
    ] = 10.0,
    as_json: JsonFlag = False,
) -> None:
    """Compare every publisher's ledger with every block in the index; exit code 1 if they differ."""
    found: list[WorkerAudit] = []
    run_query("audit", settings, _audit(settings, worker, deadline, found))
    if as_json:
        print_json([_jsonable(one) for one in found])
    else:
        _print(found)
    if not all(one.verdict.good for one in found):
        raise typer.Exit(1)


async def _audit(settings: QuerySettings, worker: str | None, deadline_s: float, found: list[WorkerAudit]) -> None:
    async with connect_store(settings) as store:
        index = await open_index(store, settings)
        client = await connect_nats(settings.nats, name="kvatlas-audit", wait=settings.wait, on_wait=print_notice)
        try:
            fleet = await FleetStore(store).all()
            if worker is not None:
                workers = [worker]
            else:
                workers = list(fleet)
                for shard in range(index.shards):
                    workers += [record.worker_id for record in await index.records(shard) if record.answering]
            drained = {name for name, record in fleet.items() if record.state is EngineState.DRAINING}
            found += await audit_workers(index, client, workers, deadline_s, drained)
            if worker is not None and not found:
                await check_worker_known(store, index, worker)
        finally:
            await client.close()


def _print(found: Sequence[WorkerAudit]) -> None:
    wrong = sum(not one.verdict.good for one in found)
    rows = [
        (one.worker_id, one.verdict.value, "-" if one.blocks is None else str(one.blocks), one.note) for one in found
    ]
    print_table(
        f"{count_text(len(found), 'worker')}, {wrong} wrong",
        ("worker", "verdict", "blocks in the ledger", "note"),
        rows,
    )
    different = [
        (
            one.worker_id,
            str(each.scope),
            each.tier.label,
            str(each.ledger_blocks),
            str(each.index_blocks),
            _excess(each),
        )
        for one in found
        for each in one.differences
    ]
    if different:
        columns = ("worker", "scope", "tier", "in the ledger", "in the index", "")
        print_table(count_text(len(different), "difference"), columns, different)


def _excess(difference: Difference) -> str:
    missing = difference.ledger_blocks - difference.index_blocks
    if not missing:
        return "other blocks"
    return f"{missing} missing" if missing > 0 else f"{-missing} too many"


def _jsonable(one: WorkerAudit) -> dict[str, Any]:
    return {
        "worker": one.worker_id,
        "verdict": one.verdict.value,
        "blocks": one.blocks,
        "note": one.note,
        "differences": [
            {
                "model_id": each.scope.model_id,
                "tokenizer_id": each.scope.tokenizer_id,
                "adapter_id": each.scope.adapter_id,
                "tenant_id": each.scope.tenant_id,
                "chain": each.scope.chain,
                "tier": each.tier.label,
                "told": each.ledger_blocks,
                "held": each.index_blocks,
            }
            for each in one.differences
        ],
    }
