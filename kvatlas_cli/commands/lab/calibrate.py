"""`kvatlas calibrate`: fits the rates of the cost profile to observed requests."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cost import EngineRates
from kvatlas.cost.bench_result import BenchResult
from kvatlas.cost.calibration import Calibration, Fit, ObservedRequest, calibrate
from kvatlas.cost.rates_file import NAMES, write_rates
from kvatlas.errors import InvalidValue
from kvatlas_cli.flags import JsonFlag
from kvatlas_cli.output import print_json, print_notice, print_table
from kvatlas_cli.token_input import STDIN

MAX_ROWS = 1_000_000


def calibrate_rates(
    rows: Annotated[
        str,
        typer.Argument(
            metavar="ROWS",
            help="A file of JSON lines, - for stdin: prompt_tokens, cached_tokens, output_tokens, ttft_ms, tpot_ms, and the "
            "engine's queued_tokens, running_requests and kv_tokens when the request began. Or a result of `vllm bench serve "
            "--save-result --save-detailed`.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the rates, for --rates-file of other commands.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fit the rates of the cost profile `engine`, and of simulated engines, to observed requests."""
    where = "stdin" if rows == STDIN else rows
    try:
        found = calibrate(_read(rows))
    except OSError as error:
        raise InvalidValue(f"{where}: {error.strerror or error}") from error
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error}") from error
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)
    if out is not None:
        write_rates(out, found.rates)
        print_notice(f"rates: {out}")


def _read(source: str) -> Iterator[ObservedRequest]:
    """The rows of a file. Raises OSError, or InvalidValue, whose message names the line."""
    with sys.stdin.buffer if source == STDIN else Path(source).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 and b'"ttfts"' in line:
                yield from BenchResult.parse(line).requests()
                return
            if number > MAX_ROWS:
                raise InvalidValue(f"more than {MAX_ROWS:,} rows, which is the limit")
            if line.strip():
                try:
                    yield ObservedRequest.parse(line)
                except InvalidValue as error:
                    raise InvalidValue(f"line {number}: {error}") from error


def _us_text(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 1_000 else f"{microseconds:.4g}"


def _print(found: Calibration) -> None:
    default = EngineRates()
    rows = [(name, _us_text(getattr(found.rates, name)), _us_text(getattr(default, name))) for name in NAMES]
    print_table(
        "microseconds", ("rate", "fitted", "default"), [*rows, ("overhead_us", _us_text(found.overhead_us), "-")]
    )
    print_table(
        "fit",
        ("time", "rows", "median error", "variance explained"),
        [_fit_row("to the first token", found.first_token), _fit_row("from token to token", found.next_token)],
    )


def _fit_row(name: str, fit: Fit | None) -> tuple[str, ...]:
    if fit is None:
        return name, "0", "-", "-"
    return name, f"{fit.rows:,}", f"{fit.median_error:.1%}", f"{fit.explained:.1%}"
