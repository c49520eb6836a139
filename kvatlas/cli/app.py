"""The commands by name."""

import sys
from typing import Annotated

import typer

from kvatlas.cli import demo, export, indexer, publish, routing, simulate_engine, up, workers
from kvatlas.version import own_version

app = typer.Typer(
    name="kvatlas",
    help="An atlas of a fleet's KV cache: which worker holds which blocks, and what a request would cost on each.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvatlas {own_version()}")
        raise typer.Exit


@app.callback()
def kvatlas(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An atlas of a fleet's KV cache."""


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("indexer")(indexer.indexer)
app.command("publish")(publish.publish)
app.command("simulate-engine")(simulate_engine.simulate_engine)
app.command("export")(export.export)
app.command("workers")(workers.workers)
app.command("overlap")(routing.overlap)
app.command("route")(routing.route)


def invoke(argv: list[str]) -> int:
    """Run a command line; its exit code. Raises what the command raises, except for usage errors: one line, code 2."""
    try:
        code = app(argv, prog_name="kvatlas", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kvatlas"
        print(f"{command}: {' '.join(error.format_message().split())} (see {command} --help)", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0
