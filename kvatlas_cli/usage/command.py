"""`kvatlas usage`: the memory that each tenant's blocks took up, and what they saved."""

import sys
from typing import Annotated, Literal

import typer

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.predictions.usage_counts import read_answer_use
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store, open_index
from kvatlas_cli.usage.rows import UsageRow, join_rows, to_csv, to_prometheus

GIB = 1 << 30
HOUR_S = 3_600

CsvFlag = Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")]
PrometheusFlag = Annotated[
    bool, typer.Option("--prometheus", help="Print sums by model for Prometheus, without tenants' names.")
]


@with_settings(QuerySettings)
def usage(
    settings: QuerySettings, as_json: JsonFlag = False, as_csv: CsvFlag = False, prometheus: PrometheusFlag = False
) -> None:
    """Show what each tenant, adapter, program and model used: byte-seconds resident, cached tokens, time saved."""
    if as_json + as_csv + prometheus > 1:
        raise typer.BadParameter("expected one of --json, --csv and --prometheus")
    form: Literal["json", "csv", "prometheus", "table"]
    form = "json" if as_json else "csv" if as_csv else "prometheus" if prometheus else "table"
    run_query("usage", settings, _usage(settings, form))


async def _usage(settings: QuerySettings, form: str) -> None:
    async with connect_store(settings) as store:
        resident = await (await open_index(store, settings)).usage()
        pools = {use.scope.pool_id for use in resident if use.scope is not None}
        pools.update(await FleetStore(store).pools())
        rows = join_rows(resident, [await read_answer_use(store, pool_id) for pool_id in sorted(pools)])
    if form == "json":
        print_json([row.jsonable() for row in rows])
    elif form == "csv":
        sys.stdout.write(to_csv(rows))
    elif form == "prometheus":
        sys.stdout.write(to_prometheus(rows))
    else:
        columns = ("model", "tenant", "adapter", "program", "GiB hours", "answers", "prompt tokens", "cached", "saved")
        print_table(f"use by {count_text(len(rows), 'row')}, since the index began", columns, list(map(_row, rows)))


def _row(row: UsageRow) -> list[str]:
    used = row.answers
    names = [name or "-" for name in row.names.values()]
    hours = sum(row.byte_seconds.values()) / GIB / HOUR_S
    counts = [f"{used.answers:,}", f"{used.prompt_tokens:,}", f"{used.cached_tokens:,}"]
    return [*names, f"{hours:,.3f}", *counts, f"{used.saved_us / 1e6:,.1f} s"]
