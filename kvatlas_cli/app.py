"""The commands by name. Only the command being run is imported, so a missing extra does not break the others. Listing the
commands imports none of them, because importing all of them would take long."""

import sys
from importlib import import_module
from typing import Annotated

import typer

COMMANDS = {
    "up": "kvatlas_cli.commands.up:up",
    "demo": "kvatlas_cli.commands.demo:demo",
    "replay": "kvatlas_cli.commands.lab.replay:replay",
    "record": "kvatlas_cli.commands.lab.record:record",
    "calibrate": "kvatlas_cli.commands.lab.calibrate:calibrate_rates",
    "indexer": "kvatlas_cli.commands.indexer:indexer",
    "publish": "kvatlas_cli.commands.publish:publish",
    "collect": "kvatlas_cli.commands.collect:collect",
    "router": "kvatlas_cli.commands.router:router",
    "epp": "kvatlas_cli.commands.epp:epp",
    "index-server": "kvatlas_cli.commands.router:index_server",
    "simulate-engine": "kvatlas_cli.commands.simulate_engine:simulate_engine",
    "export": "kvatlas_cli.commands.export:export",
    "locate": "kvatlas_cli.commands.locate:locate",
    "children": "kvatlas_cli.commands.locate:children",
    "remove": "kvatlas_cli.commands.locate:remove",
    "workers": "kvatlas_cli.commands.workers:workers",
    "usage": "kvatlas_cli.usage.command:usage",
    "rates": "kvatlas_cli.commands.rates:rates",
    "layout": "kvatlas_cli.layouts:layout",
    "audit": "kvatlas_cli.commands.audit:audit",
    "doctor": "kvatlas_cli.commands.doctor:doctor",
    "top": "kvatlas_cli.commands.top:top",
    "auth": "kvatlas_cli.commands.auth:auth",
    "overlap": "kvatlas_cli.commands.overlap:overlap",
    "route": "kvatlas_cli.commands.route:route",
}
SUMMARIES = {
    "up": "Run NATS, Valkey, an indexer, publishers and, with --router, a router on this machine until stopped.",
    "demo": "Start simulated engines on this machine and route one workload twice: round-robin, then with kvatlas.",
    "replay": "Replay a request trace against simulated workers in virtual time, once for each policy, and compare them.",
    "record": "Record the requests that routers answer, as hashes, sizes and times, for `replay` and `calibrate`.",
    "calibrate": "Fit the rates of the cost profile `engine`, and of simulated engines, to observed requests.",
    "indexer": "Apply publishers' messages to the index. Any number of replicas share the partitions.",
    "publish": "Follow one engine's KV events and publish its blocks to the index. "
    "SIGUSR1 drains it: no new requests for its workers.",
    "collect": "Publish for every labeled engine of a Kubernetes namespace, without changing its pod.",
    "router": "Serve the OpenAI API and send each request to the engine that can answer it at the lowest cost.",
    "epp": "Choose the engine for each request of a gateway: an endpoint picker over Envoy's external processing.",
    "index-server": "Answer other routers' queries about who holds a prompt, over HTTP and gRPC. It changes nothing.",
    "simulate-engine": "Run a simulated engine: a real paged KV cache behind vLLM's HTTP and event sockets, without a model.",
    "export": "Print every residency as one JSON line, with the hash as 16 hex digits (JSON numbers don't carry 64 bits).",
    "locate": "Show who holds one block: worker, tier, bytes, flags, and the time of the worker's last heartbeat.",
    "children": "Show who holds the blocks after HASH; without it, the first blocks. Needs the side index (`--side-index`).",
    "remove": "Remove one of a worker's blocks from the index; it returns when the engine stores it again.",
    "workers": "List the workers: engine, state, blocks held, load, incarnation, age of the last heartbeat.",
    "usage": "Show what each tenant, adapter, program and model used: byte-seconds resident, cached tokens, time saved.",
    "rates": "Show each worker's learned rates for the cost profile `engine`, or the defaults if none are learned yet.",
    "layout": "List the store's layouts, switch to another one that is filled, or delete one.",
    "audit": "Compare every publisher's ledger with every block in the index; exit code 1 if they differ.",
    "doctor": "Check if requests would be served well now, and print every finding with its fix; exit code 1 on errors.",
    "top": "Show the workers live in a terminal, until Ctrl-C; elsewhere print them once.",
    "auth": "Write the users of NATS and Redis, with their permissions.",
    "overlap": "Show how much of a prompt each worker and shared store holds: resident and usable blocks and "
    "tokens, by tier.",
    "route": "Pick the cheapest worker for a prompt, and show every candidate's cost. Nothing is reserved.",
}
"""Summaries for the list of commands; a command's own help has the same text."""


def application(named: str | None = None) -> typer.Typer:
    """The command line with the named command, or with a list of all commands."""
    app = typer.Typer(
        name="kvatlas",
        help="An atlas of a fleet's KV cache: which worker holds which blocks, and what a request would cost on each.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_kvatlas)
    if named is None:
        for name, summary in SUMMARIES.items():
            app.command(name, help=summary)(_kvatlas_command)
        return app
    module, _, function = COMMANDS[named].partition(":")
    command = getattr(import_module(module), function)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=named)
    else:
        from kvatlas_cli.flags import GroupedHelp  # imports pydantic

        app.command(named, cls=GroupedHelp)(command)
    return app


def invoke(argv: list[str]) -> int:
    """Run a command line and return its exit code. Raises whatever the command raises; a usage error prints one line and
    returns 2."""
    if argv[:1] == ["--"]:
        argv = argv[1:]
    named = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        code = application(named)(argv, prog_name="kvatlas", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kvatlas"
        print(f"{command}: {' '.join(error.format_message().split())} (see {command} --help)", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvatlas.version import own_version  # reads the distribution's files

        print(f"kvatlas {own_version()}")
        raise typer.Exit


def _kvatlas(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An atlas of a fleet's KV cache."""


def _kvatlas_command() -> None:
    """A command that is only listed; the command being run is imported instead."""
