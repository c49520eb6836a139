"""`kvatlas locate` and `kvatlas children`: who holds one block, or the blocks that follow one."""

from typing import Annotated

import typer

from kvatlas.settings import BlockSettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.residency_output import ResidencyPrinter, read_hash
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store, open_index

HashArgument = Annotated[
    str, typer.Argument(metavar="HASH", help="Sequence hash: 16 hex digits, as `export` prints it.")
]
PrefixArgument = Annotated[
    str, typer.Argument(metavar="[HASH]", help="Sequence hash of the block before them; default: first blocks.")
]


@with_settings(BlockSettings)
def locate(settings: BlockSettings, sequence_hash: HashArgument, as_json: JsonFlag = False) -> None:
    """Show who holds one block: worker, tier, bytes, flags, and when the worker was last heard from."""
    run_query("locate", settings, _locate(settings, read_hash(sequence_hash), as_json))


@with_settings(BlockSettings)
def children(settings: BlockSettings, prefix_hash: PrefixArgument = "", as_json: JsonFlag = False) -> None:
    """Show who holds the blocks that follow one. It needs the side index (`kvatlas indexer --side-index`)."""
    run_query("children", settings, _children(settings, read_hash(prefix_hash) if prefix_hash else None, as_json))


async def _locate(settings: BlockSettings, sequence_hash: int, as_json: bool) -> None:
    async with connect_store(settings) as store:
        found = await (await open_index(store, settings)).locate(settings.scope, sequence_hash)
        printer = await ResidencyPrinter.of_fleet(store)
    printer.print_all(f"of block {sequence_hash:016x}", settings.scope, found, as_json=as_json)


async def _children(settings: BlockSettings, prefix_hash: int | None, as_json: bool) -> None:
    async with connect_store(settings) as store:
        found = await (await open_index(store, settings)).children(settings.scope, prefix_hash)
        printer = await ResidencyPrinter.of_fleet(store)
    what = "of first blocks" if prefix_hash is None else f"of blocks that follow {prefix_hash:016x}"
    printer.print_all(what, settings.scope, found, as_json=as_json)
