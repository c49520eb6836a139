"""`kvatlas route`: the worker on which a prompt costs least."""

from typing import Annotated

import typer

from kvatlas.settings import PromptSettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.logs import printable
from kvatlas_cli.output import print_json, print_table
from kvatlas_cli.prompt_query import HintsFlag, TokensFlag, open_router, read_prompt
from kvatlas_cli.runner import run_query
from router_client import Prompt

PdFlag = Annotated[bool, typer.Option("--pd", help="Pick separate workers for prefill and decode.")]


@with_settings(PromptSettings)
def route(
    settings: PromptSettings,
    tokens: TokensFlag = None,
    hints: HintsFlag = None,
    pd: PdFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Pick the cheapest worker for a prompt, and show every candidate's cost. Nothing is reserved."""
    prompt = read_prompt(settings, tokens, hints)
    run_query("route", settings, _route_pd(settings, prompt, as_json) if pd else _route(settings, prompt, as_json))


async def _route(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with open_router(settings) as router:
        choice = await router.reserve(prompt, dry_run=True)
    if as_json:
        print_json(choice.explanation())
        return
    print_table(
        f"{choice.worker_id} at {choice.url or '(no address)'}",
        ("worker", "score us", "resident blocks", "of", "resident tokens", "usable tokens", "terms"),
        [
            (
                result.worker_id,
                str(result.score_us),
                str(result.overlap_blocks),
                str(result.required_blocks),
                str(result.resident_tokens),
                f"{'at most ' if result.upper_bound else ''}{result.usable_tokens}"
                + (f" + {result.predicted_tokens} predicted" if result.predicted_tokens else ""),
                ", ".join(str(term) for term in result.terms),
            )
            for result in choice.ranking
        ],
    )


async def _route_pd(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with open_router(settings) as router:
        pair = await router.reserve_pd(prompt, dry_run=True)
    if as_json:
        print_json(pair.explanation())
    else:
        print("\n".join(map(printable, pair.explain().split("\n"))))
