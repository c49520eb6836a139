"""The parts that `kvatlas overlap` and `kvatlas route` have in common: the flags for the prompt, the prompt, and a
router client."""

from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer

from kvatlas.cost.rates_file import read_profile
from kvatlas.errors import SettingsError
from kvatlas.settings import PromptSettings
from kvatlas_cli.output import print_notice
from kvatlas_cli.token_input import read_json, read_tokens
from router_client import Fallbacks, Prompt, RequestHints, RouterClient, RouterSettings

TokensFlag = Annotated[
    str | None,
    typer.Option(
        help="File with the prompt's token ids, `-` for stdin: a JSON array, or integers separated by white space or commas."
    ),
]


HintsFlag = Annotated[
    str | None,
    typer.Option(
        help="Instead of --tokens: file with the request's hints, `-` for stdin: a JSON object with token_ids or block_hashes, "
        "and anything else known about the request."
    ),
]


def read_prompt(settings: PromptSettings, tokens: str | None, hints: str | None) -> Prompt:
    """The prompt from a file of token ids or hints. Raises InvalidValue, or SettingsError unless exactly one of them is
    given."""
    if (tokens is None) == (hints is None):
        given = "neither" if tokens is None else "both"
        raise SettingsError(f"{given} of --tokens and --hints given; expected one of them")
    if hints is not None:
        read = RequestHints.parse(read_json(hints, "--hints"))
        known = Fallbacks(
            read.model_id or settings.scope.model_id,
            settings.tokenizer_id,
            settings.adapter_id,
            settings.tenant_id,
            estimated_decode_tokens=settings.output_tokens,
        )
        return Prompt.of_hints(read, known)
    assert tokens is not None
    return Prompt.of_tokens(settings.scope, read_tokens(tokens), output_tokens=settings.output_tokens)


def open_router(settings: PromptSettings) -> AbstractAsyncContextManager[RouterClient]:
    """A router client without a deadline for decisions."""
    profile = read_profile(settings.cost_profile, settings.rates_file)
    router_settings = RouterSettings(profile=profile, deadline_ms=None)
    return RouterClient.open(settings.redis, router_settings, wait=settings.wait, on_wait=print_notice)
