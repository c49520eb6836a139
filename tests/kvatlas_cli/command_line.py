"""The whole command line with every command; the program itself imports only the one that is run."""

from collections.abc import Callable
from functools import cache
from typing import Any

import typer.main

from kvatlas_cli.app import COMMANDS, application


@cache
def command(name: str) -> Any:
    """The command as its parser; typer's own classes have no stable names."""
    group: Any = typer.main.get_command(application(name))
    return group.commands[name]


def commands() -> dict[str, Any]:
    """All commands by name, as their parsers."""
    return {name: command(name) for name in COMMANDS}


def callback(name: str) -> Callable[..., None]:
    """The function of a command."""
    (found,) = (one.callback for one in application(name).registered_commands)
    assert found is not None
    return found
