"""From a request's body to its prompt, in the scope of the model that it names."""

from kvatlas.errors import KvatlasError
from router_client.chain_cache import ChainCache
from router_client.proxy.catalogue import Catalogue
from router_client.tokens.budget import BudgetedTokenizer
from router_client.tokens.prompt_reader import PromptReader, PromptSettings, RequestPrompt
from router_client.tokens.text_request import TextRequest


class UnknownModel(KvatlasError):
    """No worker serves the model that a request names."""


class RequestReader:
    """Finds a request's scope and its token ids."""

    def __init__(
        self,
        catalogue: Catalogue,
        tokenizer: BudgetedTokenizer | None,
        memory: ChainCache,
        settings: PromptSettings | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._prompts = PromptReader(tokenizer, memory, settings)

    async def read(self, request: TextRequest, request_id: str | None = None) -> RequestPrompt:
        """Raises UnknownModel, and InvalidValue for a request that no engine would take."""
        tenant_id = request.cache_salt if self._prompts.settings.salt_is_tenant else None
        scope = await self._catalogue.scope_of(request.model, tenant_id)
        if scope is None:
            raise UnknownModel(f"the model {request.model!r} does not exist")
        return await self._prompts.read(request, scope, request_id)
