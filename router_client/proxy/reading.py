"""From a request's body to the prompt that a worker is found for."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.identity import Scope
from kvatlas.request import DEFAULT_BLOCK_TOKENS
from router_client.chain_memory import ChainMemory
from router_client.prompt import Prompt
from router_client.proxy.catalogue import Catalogue
from router_client.tokens.budget import BudgetedTokenizer
from router_client.tokens.text_request import TextRequest
from router_client.tokens.tokenizer import CannotTokenize

LETTERS_A_TOKEN = 4
"""How long a prompt is taken to be whose tokens are not known."""


class UnknownModel(KvatlasError):
    """Nobody serves the model that a request names."""


@dataclass(frozen=True, slots=True)
class ReadingSettings:
    """`output_tokens`: how much a request is expected to generate at most. `salt_is_tenant`: as publishers have it."""

    output_tokens: int = 128
    salt_is_tenant: bool = False


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """`prompt_tokens` None: not known, so the prompt is a guess of its length and matches nothing."""

    prompt: Prompt
    prompt_tokens: int | None


class RequestReader:
    """Finds a request's scope and its token ids."""

    def __init__(
        self,
        catalogue: Catalogue,
        tokenizer: BudgetedTokenizer | None,
        memory: ChainMemory,
        settings: ReadingSettings | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._tokenizer = tokenizer
        self._memory = memory
        self._settings = settings or ReadingSettings()

    async def read(self, request: TextRequest, request_id: str | None = None) -> ReadRequest:
        """Raises UnknownModel, and InvalidValue for a request that no engine would take."""
        salt = request.cache_salt
        tenant_id = salt if self._settings.salt_is_tenant else None
        scope = await self._catalogue.scope_of(request.model, tenant_id)
        if scope is None:
            raise UnknownModel(f"the model {request.model!r} does not exist")
        tokens = await self._tokens(request)
        expected = min(request.output_tokens or self._settings.output_tokens, self._settings.output_tokens)
        if tokens is None:
            return ReadRequest(_guess(request, scope, expected, request_id), None)
        keys = ((salt,),) if salt is not None and tenant_id is None else None
        prompt = Prompt.of_tokens(
            scope, tokens, extra_keys=keys, output_tokens=expected, id=request_id, memory=self._memory
        )
        return ReadRequest(prompt, len(tokens))

    async def _tokens(self, request: TextRequest) -> Sequence[int] | None:
        if self._tokenizer is None:
            return request.token_ids
        try:
            return await self._tokenizer.token_ids(request)
        except CannotTokenize:
            return None


def _guess(request: TextRequest, scope: Scope, output_tokens: int, request_id: str | None) -> Prompt:
    try:
        length = request.letters // LETTERS_A_TOKEN
    except InvalidValue:
        length = 0
    return Prompt.of_hashes(
        scope, b"", DEFAULT_BLOCK_TOKENS, input_tokens=length, output_tokens=output_tokens, id=request_id
    )
