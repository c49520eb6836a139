"""The commands by name. Only the command that is run is imported, so a missing extra does not break the others."""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated

import typer

from kvatlas.version import own_version

COMMANDS = {
    "up": "kvatlas_cli.commands.up:up",
    "demo": "kvatlas_cli.commands.demo:demo",
    "replay": "kvatlas_cli.commands.replay:replay",
    "indexer": "kvatlas_cli.commands.indexer:indexer",
    "publish": "kvatlas_cli.commands.publish:publish",
    "router": "kvatlas_cli.commands.router:router",
    "simulate-engine": "kvatlas_cli.commands.simulate_engine:simulate_engine",
    "export": "kvatlas_cli.commands.export:export",
    "workers": "kvatlas_cli.commands.workers:workers",
    "rates": "kvatlas_cli.commands.rates:rates",
    "audit": "kvatlas_cli.commands.audit:audit",
    "doctor": "kvatlas_cli.commands.doctor:doctor",
    "auth": "kvatlas_cli.commands.auth:auth",
    "overlap": "kvatlas_cli.commands.overlap:overlap",
    "route": "kvatlas_cli.commands.route:route",
}


def application(commands: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with these commands. A command whose extra is missing is listed, and reports it when it is run."""
    app = typer.Typer(
        name="kvatlas",
        help="An atlas of a fleet's KV cache: which worker holds which blocks, and what a request would cost on each.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_kvatlas)
    for name in commands:
        module, _, function = COMMANDS[name].partition(":")
        try:
            command = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            accept_all = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, help="(not installed)", context_settings=accept_all)(_raise_missing(error))
        else:
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    return app


def invoke(argv: list[str]) -> int:
    """Run a command line and return its exit code. Raises what the command raises; a usage error is one line, code 2."""
    named = [word for word in argv[:1] if word in COMMANDS]
    try:
        code = application(named or COMMANDS)(argv, prog_name="kvatlas", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kvatlas"
        print(f"{command}: {' '.join(error.format_message().split())} (see {command} --help)", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvatlas {own_version()}")
        raise typer.Exit


def _kvatlas(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An atlas of a fleet's KV cache."""


def _raise_missing(error: ModuleNotFoundError) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command
