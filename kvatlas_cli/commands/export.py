"""`kvatlas export`: prints every residency as one JSON line."""

import json
import sys
from typing import Annotated

import typer

from kvatlas.blocks.residency import Residency
from kvatlas.request import hash_text
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import check_worker_known, connect_store, open_index


@with_settings(QuerySettings)
def export(
    settings: QuerySettings,
    worker: Annotated[str | None, typer.Option(help="Export only what this worker holds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON lines.")] = False,
) -> None:
    """Print every residency as one JSON line, with the hash as 16 hex digits (JSON numbers don't carry 64 bits)."""
    run_query("export", settings, _export(settings, worker))


async def _export(settings: QuerySettings, worker: str | None) -> None:
    async with connect_store(settings) as store:
        index = await open_index(store, settings)
        if worker is not None:
            await check_worker_known(store, index, worker)
        lines: list[str] = []
        async for residency in index.snapshot(worker):
            lines.append(_line(residency))
            if len(lines) == 4096:
                _write(lines)
        _write(lines)


def _line(residency: Residency) -> str:
    return json.dumps(
        {
            "worker": residency.worker_id,
            "model_id": residency.scope.model_id,
            "tokenizer_id": residency.scope.tokenizer_id,
            "adapter_id": residency.scope.adapter_id,
            "tenant_id": residency.scope.tenant_id,
            "tier": residency.tier.label,
            "sequence_hash": hash_text(residency.sequence_hash),
            "resumable": residency.resumable,
        }
    )


def _write(lines: list[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
    lines.clear()
