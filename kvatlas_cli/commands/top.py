"""`kvatlas top`: shows the workers live in a terminal; elsewhere, prints the table of `kvatlas workers` once."""

import sys

import anyio

from kvatlas.errors import Unreachable
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.settings import TopSettings
from kvatlas_cli.commands.workers import COLUMNS, print_workers, read_rows
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import count_text, make_table
from kvatlas_cli.runner import run_service
from kvatlas_cli.store_connection import connect_store, open_index

LIVE_COLUMNS = ("worker", "state", "blocks", "running", "waiting", "cache", "age")
"""The columns that change; all of them together fit into 80 characters."""


@with_settings(TopSettings)
def top(settings: TopSettings) -> None:
    """Show the workers live in a terminal, until Ctrl-C; elsewhere print them once."""
    run_service("top", settings, _top(settings))


async def _top(settings: TopSettings) -> None:
    from rich.live import Live

    async with connect_store(settings) as store:
        index, fleet = await open_index(store, settings), FleetStore(store)
        rows = await read_rows(index, await fleet.all())
        if not sys.stdout.isatty():
            print_workers(rows)
            return
        shown, trouble = [COLUMNS.index(column) for column in LIVE_COLUMNS], ""
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                cells = [[row[at] for at in shown] for row in rows]
                live.update(make_table(count_text(len(rows), "worker") + trouble, LIVE_COLUMNS, cells), refresh=True)
                await anyio.sleep(settings.interval_s)
                try:
                    rows, trouble = await read_rows(index, await fleet.all()), ""
                except Unreachable as error:
                    trouble = f"; {error}; trying again"
