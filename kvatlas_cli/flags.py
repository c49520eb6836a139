"""A command's flags, generated from the fields of its settings class: name, default, help and variable."""

from collections.abc import Callable
from enum import Enum
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from kvatlas.settings import COMMON, OWN, ProcessSettings, flag_of, variable_of


class GroupedHelp(TyperCommand):
    """A command whose help shows its options in groups, each group under its own heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = ARGUMENTS if parameter.param_type_name == "argument" else OWN
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


S = TypeVar("S", bound=ProcessSettings)

ARGUMENTS = "Arguments"
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def with_settings(settings_class: type[S]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `command(settings, ...)` a flag for each field of its settings, besides its own parameters.

    Flags are passed as text and checked only by the settings class, so wrong flags and wrong variables are reported in the
    same way.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(signature(command).parameters.values())[1:]
        fields = settings_class.model_fields
        groups = settings_class.group_of_field()

        def run(**given: Any) -> None:
            flags = {name: given.pop(name) for name in fields}
            command(settings_class.load(**flags), **given)

        flags = [_parameter(name, fields[name], group) for name, group in groups.items()]
        before = sum(group in (COMMON, OWN) for group in groups.values())
        everything = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*flags[:before], *own, *flags[before:])]
        run.__dict__["settings_class"] = settings_class  # for tests that check manifests against the command line
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = signature(run).replace(  # type: ignore[attr-defined]
            parameters=everything, return_annotation=None
        )
        run.__annotations__ = {p.name: p.annotation for p in everything}
        return run

    return decorate


def _parameter(name: str, info: FieldInfo, group: str) -> Parameter:
    kind: Any
    if info.annotation in (bool, bool | None):
        kind, metavar = bool, None
        spelled = f"{flag_of(name)}/--no-{name.replace('_', '-')}"
    else:
        kind, metavar = str, _metavar(info.annotation)
        spelled = flag_of(name)
    if info.is_required():
        default = "required"
    elif info.default is None or info.default in ("", ()) or info.default_factory is not None:
        default = ""
    else:
        default = f"default {_default_text(info.default)}"
    notes = "; ".join(note for note in (default, variable_of(name)) if note)
    option = typer.Option(
        spelled, help=f"{info.description} [{notes}]", metavar=metavar, show_default=False, rich_help_panel=group
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _metavar(annotation: Any) -> str:
    """The placeholder for the value in the help text."""
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return "|".join(str(choice.value) for choice in annotation)
        return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "TEXT")
    inner = get_args(annotation)
    return _metavar(inner[0]) if inner else "TEXT"


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value) if isinstance(value, Enum) else str(value)
