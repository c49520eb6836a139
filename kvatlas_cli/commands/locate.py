"""`kvatlas locate`, `children` and `remove`: show who holds one block or the blocks that follow it, or remove it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from kvatlas.block_lookup.lookup import BlockLookup
from kvatlas.blocks.block_names import BlockName, needs_publishers, read_block_name
from kvatlas.bus.connection import connect_nats
from kvatlas.errors import SettingsError
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.settings import BlockSettings
from kvatlas.store.connection import Store
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_notice
from kvatlas_cli.residency_output import ResidencyPrinter
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import check_worker_known, connect_store, open_index

HashArgument = Annotated[
    str | None, typer.Argument(metavar="[HASH]", help="Sequence hash: 16 hex digits, as `export` prints it.")
]
PrefixFlag = Annotated[
    str | None,
    typer.Option(help="Hash of the block before HASH; the two form a block key. `root` for a prompt's first block."),
]
EngineHashFlag = Annotated[
    str | None,
    typer.Option(help="Instead of HASH: the engine's own hash of the block, which its publisher knows."),
]
WorkerFlag = Annotated[str, typer.Option(help="Worker to take the block from.")]


@with_settings(BlockSettings)
def locate(
    settings: BlockSettings,
    sequence_hash: HashArgument = None,
    prefix: PrefixFlag = None,
    engine_hash: EngineHashFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who holds one block: worker, tier, bytes, flags, and the time of the worker's last heartbeat."""
    name = _named(read_block_name(settings.scope, sequence_hash, prefix, engine_hash))
    run_query("locate", settings, _locate(settings, name, sequence_hash or engine_hash or "", as_json))


@with_settings(BlockSettings)
def children(
    settings: BlockSettings,
    sequence_hash: HashArgument = None,
    prefix: PrefixFlag = None,
    engine_hash: EngineHashFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who holds the blocks after HASH; without it, the first blocks. Needs the side index (`--side-index`)."""
    name = read_block_name(settings.scope, sequence_hash, prefix, engine_hash)
    run_query("children", settings, _children(settings, name, sequence_hash or engine_hash or "", as_json))


@with_settings(BlockSettings)
def remove(
    settings: BlockSettings,
    worker: WorkerFlag,
    sequence_hash: HashArgument = None,
    prefix: PrefixFlag = None,
    engine_hash: EngineHashFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove one of a worker's blocks from the index; it returns when the engine stores it again."""
    name = _named(read_block_name(settings.scope, sequence_hash, prefix, engine_hash))
    run_query("remove", settings, _remove(settings, worker, name, as_json))


def _named(name: BlockName | None) -> BlockName:
    if name is None:
        raise SettingsError("no block is named; give HASH or --engine-hash")
    return name


@asynccontextmanager
async def _lookup(settings: BlockSettings, store: Store, *, publishers: bool) -> AsyncIterator[BlockLookup]:
    index, fleet = await open_index(store, settings), FleetStore(store)
    if not publishers:
        yield BlockLookup(index, fleet, None)
        return
    client = await connect_nats(settings.nats, name="kvatlas-blocks", wait=settings.wait, on_wait=print_notice)
    try:
        yield BlockLookup(index, fleet, client)
    finally:
        await client.close()


async def _locate(settings: BlockSettings, name: BlockName, text: str, as_json: bool) -> None:
    async with connect_store(settings) as store:
        async with _lookup(settings, store, publishers=needs_publishers(name)) as lookup:
            found = await lookup.locate(settings.scope, name)
        printer = await ResidencyPrinter.of_fleet(store)
    printer.print_all(f"of block {text}", settings.scope, found, as_json=as_json)


async def _children(settings: BlockSettings, name: BlockName | None, text: str, as_json: bool) -> None:
    async with connect_store(settings) as store:
        async with _lookup(settings, store, publishers=needs_publishers(name)) as lookup:
            found = await lookup.children(settings.scope, name)
        printer = await ResidencyPrinter.of_fleet(store)
    what = "of first blocks" if name is None else f"of blocks that follow {text}"
    printer.print_all(what, settings.scope, found, as_json=as_json)


async def _remove(settings: BlockSettings, worker: str, name: BlockName, as_json: bool) -> None:
    async with connect_store(settings) as store:
        await check_worker_known(store, await open_index(store, settings), worker)
        async with _lookup(settings, store, publishers=True) as lookup:
            removed = await lookup.remove(settings.scope, worker, name)
    if as_json:
        print_json({"worker": worker, "removed": removed})
    else:
        print_notice(f"removed {count_text(removed, 'residency', 'residencies')} of worker {worker}")
