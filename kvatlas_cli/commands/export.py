"""`kvatlas export`: prints every residency as one JSON line."""

import json
import sys
from typing import Annotated

import typer

from kvatlas.block_lookup.fields import scope_fields
from kvatlas.blocks.residency import ResidentBlocks
from kvatlas.errors import SettingsError
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.residency_output import ResidencyPrinter
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import check_worker_known, connect_store, open_index


@with_settings(QuerySettings)
def export(
    settings: QuerySettings,
    worker: Annotated[str | None, typer.Option(help="Export only this worker's residencies.")] = None,
    summary: Annotated[
        bool,
        typer.Option("--summary", help="Print one line per scope and tier instead: blocks and bytes of all workers."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON lines.")] = False,
) -> None:
    """Print every residency as one JSON line, with the hash as 16 hex digits (JSON numbers don't carry 64 bits)."""
    if summary and worker is not None:
        raise SettingsError(f"--worker is {worker}, but --summary is for all workers; expected one of the two")
    run_query("export", settings, _summarize(settings) if summary else _export(settings, worker))


async def _export(settings: QuerySettings, worker: str | None) -> None:
    async with connect_store(settings) as store:
        index = await open_index(store, settings)
        if worker is not None:
            await check_worker_known(store, index, worker)
        printer = await ResidencyPrinter.of_fleet(store)
        lines: list[str] = []
        async for residency in index.snapshot(worker):
            lines.append(json.dumps(printer.jsonable(residency)))
            if len(lines) == 4096:
                _write(lines)
        _write(lines)


async def _summarize(settings: QuerySettings) -> None:
    async with connect_store(settings) as store:
        rows = await (await open_index(store, settings)).resident_blocks()
    _write([json.dumps(scope_fields(row.scope) | _amounts(row)) for row in rows])


def _amounts(row: ResidentBlocks) -> dict[str, str | int]:
    return {"tier": row.tier.label, "blocks": row.blocks, "bytes": row.bytes}


def _write(lines: list[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
    lines.clear()
