"""`kvatlas doctor`: checks every part of the installation."""

from collections import Counter

import typer

from kvatlas.fleet.identities import load_identities
from kvatlas.settings import DoctorSettings
from kvatlas_cli.doctor import Finding, Level, examine
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_notice
from kvatlas_cli.runner import run_query

_CHECK_WIDTH = 19


@with_settings(DoctorSettings)
def doctor(settings: DoctorSettings, as_json: JsonFlag = False) -> None:
    """Check servers, indexers, workers and routers; print each finding and what to do; exit code 1 if one is an error."""
    found: list[Finding] = []
    run_query("doctor", settings, _examine(settings, found))
    if as_json:
        print_json([_jsonable(one) for one in found])
    else:
        _print(found)
    if any(one.level is Level.ERROR for one in found):
        raise typer.Exit(1)


async def _examine(settings: DoctorSettings, found: list[Finding]) -> None:
    identities = load_identities(settings.identities, "--identities") if settings.identities else None
    found += await examine(
        settings.nats,
        settings.redis,
        identities=identities,
        listen_s=settings.listen_s,
        wait=settings.wait,
        on_wait=print_notice,
    )


def _print(found: list[Finding]) -> None:
    for one in found:
        print(f"{one.level.value:8} {one.check:{_CHECK_WIDTH}} {one.line}")
        if one.advice:
            print(f"{'':8} {'':{_CHECK_WIDTH}} -> {one.advice}")
    counts = Counter(one.level for one in found)
    print(f"{count_text(counts[Level.ERROR], 'error')}, {count_text(counts[Level.WARNING], 'warning')}")


def _jsonable(one: Finding) -> dict[str, str]:
    return {"check": one.check, "level": one.level.value, "line": one.line, "advice": one.advice}
