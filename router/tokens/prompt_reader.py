"""Turns a request's body into its `Prompt`, in a known scope."""

from dataclasses import replace

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from kvatlas.request import DEFAULT_BLOCK_TOKENS, DEFAULT_SLO, Slo
from kvatlas_router.tokens.budget import BudgetedTokenizer
from kvatlas_router.tokens.text_request import LETTERS_A_TOKEN, TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens
from router_client.prompt import Prompt

MEDIA_TOKENS = 1_000
"""Assumed number of tokens in an image of about one megapixel, used to guess the length of a prompt whose tokens are
unknown."""


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """`output_tokens`: the number expected for a request without a limit, until the router has learned better.
    `salt_is_tenant`: must match the publishers' setting. `slo`: applies to all requests. `session_headers`: names, in lower
    case, of headers that name a session; the first one that is present counts."""

    output_tokens: int = 128
    salt_is_tenant: bool = False
    slo: Slo = DEFAULT_SLO
    session_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """A request's prompt. `prompt_tokens=None`: unknown, for the reason given in `untokenized`. The length is then a
    guess, and the prompt matches nothing or, for `media`, only what precedes its first image."""

    prompt: Prompt
    prompt_tokens: int | None
    untokenized: str = ""


class PromptReader:
    """Tokenizes requests and turns them into prompts."""

    def __init__(self, tokenizer: BudgetedTokenizer | None, settings: PromptSettings | None = None) -> None:
        self.settings = settings or PromptSettings()
        self._tokenizer = tokenizer

    async def read(self, request: TextRequest, scope: Scope, request_id: str | None = None) -> RequestPrompt:
        """Raises InvalidValue for a request that no engine would accept."""
        if request.scope is not scope:
            request = request.of_engines(request.kind, scope)
        tokens, why = await self._tokenize(request)
        limits = request.output_limits
        if tokens is None:
            letters = _letters(request) + request.media_items * MEDIA_TOKENS * LETTERS_A_TOKEN
            guess = self.guess(scope, letters, request_id)
            said = replace(
                guess.prompt, session_id=request.session_id, reading=request.cache_reading, output_limits=limits
            )
            return replace(guess, prompt=said, untokenized=why)
        salt = request.cache_salt
        keys = ((salt,),) if salt is not None and not self.settings.salt_is_tenant else None
        length = None
        if tokens.cut:
            whole = _letters(request) // LETTERS_A_TOKEN + request.media_items * MEDIA_TOKENS
            length = max(whole, len(tokens.ids) + 1)
        prompt = Prompt.of_tokens(
            scope,
            tokens.ids,
            extra_keys=keys,
            media=tokens.media,
            input_tokens=length,
            output_tokens=self.settings.output_tokens,
            output_limits=limits,
            slo=self.settings.slo,
            id=request_id,
            session_id=request.session_id,
            reading=request.cache_reading,
        )
        return RequestPrompt(prompt, None, "media") if tokens.cut else RequestPrompt(prompt, len(tokens.ids))

    def guess(self, scope: Scope, letters: int, request_id: str | None = None) -> RequestPrompt:
        """A prompt for a request with unknown tokens; its length is what `letters` characters usually take."""
        length = letters // LETTERS_A_TOKEN
        prompt = Prompt.of_hashes(
            scope,
            b"",
            DEFAULT_BLOCK_TOKENS,
            input_tokens=length,
            output_tokens=self.settings.output_tokens,
            slo=self.settings.slo,
            id=request_id,
        )
        return RequestPrompt(prompt, None, "unread")

    async def _tokenize(self, request: TextRequest) -> tuple[PromptTokens | None, str]:
        """The prompt's tokens; None and the reason if they are unknown."""
        if self._tokenizer is None:
            given = request.token_ids
            return (None if given is None else PromptTokens(given, request.media)), "off"
        try:
            return await self._tokenizer.prompt_tokens(request), ""
        except CannotTokenize as error:
            return None, error.why.value


def _letters(request: TextRequest) -> int:
    try:
        return request.letters
    except InvalidValue:
        return 0
