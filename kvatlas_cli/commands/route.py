"""`kvatlas overlap` and `kvatlas route`: what a router would learn of a prompt, from the shell."""

from typing import Annotated, Any

import typer

from kvatlas.cost import CostProfile, EngineProfile, QuillcacheProfile
from kvatlas.settings import PromptSettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_table
from kvatlas_cli.runner import run_query, tell
from kvatlas_cli.token_input import read_tokens
from router_client import Prompt, PromptOverlap, RouterClient, RouterSettings, WorkerOverlap

TokensFlag = Annotated[
    str,
    typer.Option(
        help="File with the prompt's token ids, `-` for stdin: a JSON array, or white space and commas between."
    ),
]


PdFlag = Annotated[bool, typer.Option("--pd", help="Pick a worker for the prompt and one for the answer.")]


@with_settings(PromptSettings)
def overlap(settings: PromptSettings, tokens: TokensFlag, as_json: JsonFlag = False) -> None:
    """Show what each worker holds of a prompt: resident and usable blocks and tokens, by tier."""
    run_query("overlap", settings, _overlap(settings, _prompt(settings, tokens), as_json))


@with_settings(PromptSettings)
def route(settings: PromptSettings, tokens: TokensFlag, pd: PdFlag = False, as_json: JsonFlag = False) -> None:
    """Pick the worker where a prompt costs least, and show every candidate's cost. Nothing is reserved."""
    asked = _prompt(settings, tokens)
    run_query("route", settings, _route_pd(settings, asked, as_json) if pd else _route(settings, asked, as_json))


def _prompt(settings: PromptSettings, tokens: str) -> Prompt:
    return Prompt.of_tokens(settings.scope, read_tokens(tokens), output_tokens=settings.output_tokens)


def _router_settings(settings: PromptSettings) -> RouterSettings:
    profile: CostProfile = EngineProfile() if settings.cost_profile == "engine" else QuillcacheProfile()
    return RouterSettings(profile=profile, deadline_ms=None)


async def _overlap(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with RouterClient.open(
        settings.redis_url, _router_settings(settings), wait=settings.wait, on_wait=tell
    ) as router:
        found = await router.overlap(prompt)
    if not found.workers:
        tell(f"no worker serves model {prompt.scope.model_id!r} with tokenizer {prompt.scope.tokenizer_id!r}")
    if as_json:
        print_json(_overlap_jsonable(found))
        return
    print_table(
        f"prompt of {count_text(found.input_tokens, 'token')}",
        ("worker", "resident blocks", "of", "resident tokens", "usable tokens", "tiers", "routable"),
        [
            (
                worker.worker_id,
                str(worker.resident_blocks),
                str(worker.required_blocks),
                str(worker.resident_tokens),
                str(worker.usable_tokens),
                _tiers(worker),
                "yes" if worker.routable else "no",
            )
            for worker in found
        ],
    )


async def _route_pd(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with RouterClient.open(
        settings.redis_url, _router_settings(settings), wait=settings.wait, on_wait=tell
    ) as router:
        pair = await router.pick_pd(prompt)
    if as_json:
        print_json(pair.explanation())
    else:
        print(pair.explain())


async def _route(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with RouterClient.open(
        settings.redis_url, _router_settings(settings), wait=settings.wait, on_wait=tell
    ) as router:
        choice = await router.pick(prompt)
    if as_json:
        print_json(choice.explanation())
        return
    print_table(
        f"{choice.worker_id} at {choice.url or '(no address)'}",
        ("worker", "score us", "overlap blocks", "of", "usable tokens", "terms"),
        [
            (
                result.worker_id,
                str(result.score_us),
                str(result.overlap_blocks),
                str(result.required_blocks),
                f"{result.usable_tokens} + {result.predicted_tokens} predicted"
                if result.predicted_tokens
                else str(result.usable_tokens),
                ", ".join(str(term) for term in result.terms),
            )
            for result in choice.ranking
        ],
    )


def _tiers(worker: WorkerOverlap) -> str:
    """Tokens by tier, and what is only predicted."""
    told = [f"{tier.label} {tokens}" for tier, tokens in worker.tokens_by_tier.items()]
    if not worker.events:
        told.append(f"{worker.predicted_tokens} predicted: it tells no events")
    return ", ".join(told) or "-"


def _overlap_jsonable(found: PromptOverlap) -> dict[str, Any]:
    return {"input_tokens": found.input_tokens, "workers": [_worker_jsonable(worker) for worker in found]}


def _worker_jsonable(worker: WorkerOverlap) -> dict[str, Any]:
    return {
        "worker": worker.worker_id,
        "block_size": worker.block_size,
        "required_blocks": worker.required_blocks,
        "resident_blocks": worker.resident_blocks,
        "resident_tokens": worker.resident_tokens,
        "usable_blocks": worker.usable_blocks,
        "usable_tokens": worker.usable_tokens,
        "tokens_by_tier": {tier.label: tokens for tier, tokens in worker.tokens_by_tier.items()},
        "routable": worker.routable,
        "events": worker.events,
        "predicted_tokens": worker.predicted_tokens,
    }
