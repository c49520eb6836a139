"""`kvatlas overlap`: how much of a prompt each worker holds."""

from typing import Any

from kvatlas.settings import PromptSettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_table
from kvatlas_cli.prompt_query import HintsFlag, TokensFlag, open_router, read_prompt
from kvatlas_cli.runner import run_query
from router_client import NoWorkers, Prompt, PromptOverlap, WorkerOverlap


@with_settings(PromptSettings)
def overlap(
    settings: PromptSettings, tokens: TokensFlag = None, hints: HintsFlag = None, as_json: JsonFlag = False
) -> None:
    """Show how much of a prompt each worker and shared store holds: resident and usable blocks and tokens, by tier."""
    run_query("overlap", settings, _overlap(settings, read_prompt(settings, tokens, hints), as_json))


async def _overlap(settings: PromptSettings, prompt: Prompt, as_json: bool) -> None:
    async with open_router(settings) as router:
        found = await router.overlap(prompt)
    if as_json:
        print_json(_jsonable(found))
    if not found.workers:
        scope = prompt.scope
        raise NoWorkers(
            f"no worker serves model {scope.model_id!r} with tokenizer {scope.tokenizer_id!r}; see kvatlas workers"
        )
    if as_json:
        return
    headers = ["worker", "kind", "resident blocks", "of", "resident tokens", "usable tokens", "tiers", "routable"]
    rows = [_row(worker) for worker in found]
    notes = [_notes(worker) for worker in found]
    if any(notes):
        headers.append("why they end there")
        rows = [[*row, note or "-"] for row, note in zip(rows, notes, strict=True)]
    print_table(f"prompt of {count_text(found.input_tokens, 'token')}", headers, rows)


def _row(worker: WorkerOverlap) -> list[str]:
    return [
        worker.worker_id,
        worker.kind,
        str(worker.resident_blocks),
        str(worker.required_blocks),
        str(worker.resident_tokens),
        f"{'at most ' if worker.upper_bound else ''}{worker.usable_tokens}",
        _tiers_text(worker),
        "yes" if worker.routable else "no",
    ]


def _notes(worker: WorkerOverlap) -> str:
    """Why the worker's usable tokens end where they do, and why there may be fewer."""
    return "; ".join(filter(None, (worker.why, worker.upper_bound)))


def _tiers_text(worker: WorkerOverlap) -> str:
    """Tokens by tier, plus those that are only predicted."""
    parts = [f"{tier.label} {tokens}" for tier, tokens in worker.tokens_by_tier.items()]
    if not worker.events:
        parts.append(f"{worker.predicted_tokens} predicted (engine without events)")
    return ", ".join(parts) or "-"


def _jsonable(found: PromptOverlap) -> dict[str, Any]:
    workers = [_worker_jsonable(worker) for worker in found]
    return {"input_tokens": found.input_tokens, "workers": workers, "remarks": list(found.remarks)}


def _worker_jsonable(worker: WorkerOverlap) -> dict[str, Any]:
    return {
        "worker": worker.worker_id,
        "kind": worker.kind,
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
        "marks": worker.marks,
        "upper_bound": worker.upper_bound,
        "why": worker.why,
    }
