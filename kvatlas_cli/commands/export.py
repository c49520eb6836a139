"""`kvatlas export`: prints every residency as one JSON line."""

import json
import sys
from typing import Annotated

import typer

from kvatlas.blocks.residency import Residency
from kvatlas.index.redis.index import open_redis_index
from kvatlas.request import hash_text
from kvatlas.settings import Settings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store


@with_settings(Settings)
def export(
    settings: Settings,
    worker: Annotated[str | None, typer.Option(help="Export only what this worker holds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON lines.")] = False,
) -> None:
    """Print every residency as one JSON line, with the hash as 16 hex digits (JSON numbers don't carry 64 bits)."""
    run_query("export", settings, _export(settings, worker))


async def _export(settings: Settings, worker: str | None) -> None:
    async with connect_store(settings) as store:
        index = await open_redis_index(store, writer=False)
        lines: list[str] = []
        async for residency in index.snapshot(worker):
            lines.append(_line(residency))
            if len(lines) == 4096:
                _write(lines)
        _write(lines)
        if worker is not None and await index.record(worker) is None:
            print_notice(f"worker {worker!r} is not known to the index")


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
        }
    )


def _write(lines: list[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
    lines.clear()
