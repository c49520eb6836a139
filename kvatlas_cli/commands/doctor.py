"""`kvatlas doctor`: checks every part of the installation, or follows one request."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvatlas.errors import KvatlasError
from kvatlas.fleet.identities import load_identities
from kvatlas.settings import DoctorSettings
from kvatlas_cli.doctor import Finding, Level, examine, follow_request, read_request
from kvatlas_cli.doctor.expected_workers import list_expected, read_expected
from kvatlas_cli.doctor.heartbeats import Told
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.logs import printable
from kvatlas_cli.output import count_text, line_width, print_json, print_notice, wrap
from kvatlas_cli.runner import run_query

_LEVEL_WIDTH, _CHECK_WIDTH = 8, 19

RequestFlag = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Explain the overlap of one prompt: a file with an OpenAI request, a router's hints, or token ids "
        "(with --model-id); `-` for stdin.",
    ),
]


@with_settings(DoctorSettings)
def doctor(settings: DoctorSettings, request: RequestFlag = None, as_json: JsonFlag = False) -> None:
    """Check if requests would be served well now, and print every finding with its fix; exit code 1 on errors."""
    found: list[Finding] = []
    run_query("doctor", settings, _examine(settings, found) if request is None else _follow(settings, request, found))
    if as_json:
        print_json([_jsonable(one) for one in found])
    else:
        _print(found)
    wrong = (Level.ERROR, Level.WARNING) if settings.strict else (Level.ERROR,)
    if any(one.level in wrong for one in found):
        raise typer.Exit(1)


async def _examine(settings: DoctorSettings, found: list[Finding]) -> None:
    identities = load_identities(settings.identities, "--identities") if settings.identities else None
    expected = {} if settings.expected is None else read_expected(settings.expected)
    unlisted: list[Finding] = []
    if settings.expected_selector is not None:
        expected |= await _list_pods(settings.expected_selector, unlisted)
    with _progress() as on_step:
        found += await examine(
            settings.nats,
            settings.redis,
            identities=identities,
            listen_s=settings.listen_s,
            status_urls=settings.status_urls,
            expected=expected,
            wait=settings.wait,
            on_wait=print_notice,
            on_step=on_step,
        )
    found += unlisted


async def _list_pods(selector: str, found: list[Finding]) -> dict[str, str]:
    """The expected workers, from their pods. Raises SettingsError outside a pod. If the pods can't be listed, that is a
    finding."""
    from kvatlas_router.gateway.kubernetes_api import open_kubernetes_api  # needs the extra

    async with open_kubernetes_api() as api:
        try:
            return await list_expected(api, selector)
        except KvatlasError as error:
            advice = "its service account needs the verb list on pods, as the collector's does"
            found.append(
                Finding("workers.missing", Level.WARNING, f"pods with {selector} could not be listed: {error}", advice)
            )
            return {}


async def _follow(settings: DoctorSettings, source: str, found: list[Finding]) -> None:
    request = read_request(source)
    scope = None if settings.model_id is None else settings.scope
    with _progress() as on_step:
        found += await follow_request(
            settings.nats,
            settings.redis,
            request,
            scope,
            settings.tenant_id,
            settings.listen_s,
            on_step,
            settings.engine_access,
        )


@contextmanager
def _progress() -> Iterator[Told]:
    """Show the current step on one line of a terminal; show nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(line: str) -> None:
        width = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{line[: width - 4]} ...", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(found: list[Finding]) -> None:
    """Print one finding per line, wrapped to the terminal's width if there is a terminal."""
    margin = " " * (_LEVEL_WIDTH + 1 + _CHECK_WIDTH + 1)
    width = line_width() or 0
    for one in found:
        _print_wrapped(
            f"{one.level.value:{_LEVEL_WIDTH}} {one.check:{_CHECK_WIDTH}} {printable(one.line)}", margin, width
        )
        if one.advice:
            _print_wrapped(f"{margin}-> {printable(one.advice)}", f"{margin}   ", width)
    counts = Counter(one.level for one in found)
    print(f"{count_text(counts[Level.ERROR], 'error')}, {count_text(counts[Level.WARNING], 'warning')}")


def _print_wrapped(line: str, margin: str, width: int) -> None:
    """Print a line, wrapped to `width`; if that is 0, the line is not wrapped."""
    print("\n".join(wrap(line, width, "", margin)) if width > len(margin) + 20 else line)


def _jsonable(one: Finding) -> dict[str, str]:
    return {"check": one.check, "level": one.level.value, "line": one.line, "advice": one.advice}
