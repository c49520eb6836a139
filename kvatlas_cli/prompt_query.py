"""What `kvatlas overlap` and `kvatlas route` share: the flag for token ids, the prompt, and a router client."""

from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer

from kvatlas.cost import CostProfile, EngineProfile, QuillcacheProfile
from kvatlas.settings import PromptSettings
from kvatlas_cli.output import print_notice
from kvatlas_cli.token_input import read_tokens
from router_client import Prompt, RouterClient, RouterSettings

TokensFlag = Annotated[
    str,
    typer.Option(
        help="File with the prompt's token ids, `-` for stdin: a JSON array, or integers separated by white space or commas."
    ),
]


def read_prompt(settings: PromptSettings, tokens: str) -> Prompt:
    """The prompt whose token ids are in the file `tokens`. Raises InvalidValue."""
    return Prompt.of_tokens(settings.scope, read_tokens(tokens), output_tokens=settings.output_tokens)


def open_router(settings: PromptSettings) -> AbstractAsyncContextManager[RouterClient]:
    """A router client without a deadline for decisions."""
    profile: CostProfile = EngineProfile() if settings.cost_profile == "engine" else QuillcacheProfile()
    router_settings = RouterSettings(profile=profile, deadline_ms=None)
    return RouterClient.open(settings.redis, router_settings, wait=settings.wait, on_wait=print_notice)
