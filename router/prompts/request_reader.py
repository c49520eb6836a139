"""Turns a request's body into its prompt, in the scope of the model that it names."""

from collections.abc import Sequence
from dataclasses import replace

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.identity import Scope
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tokens.budget import BudgetedTokenizer
from kvatlas_router.tokens.prompt_reader import PromptReader, PromptSettings, RequestPrompt
from kvatlas_router.tokens.text_request import TextRequest, is_session_id
from router_client.decision.selector import Selector


class UnknownModel(KvatlasError):
    """No worker serves the model that a request names."""


class RequestReader:
    """Finds the scope and the token ids of a request."""

    def __init__(
        self,
        catalogue: Catalogue,
        tokenizer: BudgetedTokenizer | None,
        settings: PromptSettings | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._prompts = PromptReader(tokenizer, settings)
        self._session_headers = dict.fromkeys(name.encode() for name in self._prompts.settings.session_headers)

    @property
    def salt_is_tenant(self) -> bool:
        """True if cache salts name tenants."""
        return self._prompts.settings.salt_is_tenant

    async def read(
        self, request: TextRequest, request_id: str | None = None, caller: Caller = ANYBODY
    ) -> RequestPrompt:
        """With `salt_is_tenant`, the salt of a proven caller's request must already begin with its tenant (`Caller.salted`).
        Raises UnknownModel, or InvalidValue for a request that no engine would accept."""
        salt = request.cache_salt if self._prompts.settings.salt_is_tenant else None
        scope = await self._scope(request.model, salt or caller.tenant_id, caller)
        request = request.of_engines(await self._catalogue.kind_of(scope), scope)
        served = request.model
        if scope.adapter_id is None and request.adapter is not None:
            served, scope = request.adapter, replace(scope, adapter_id=request.adapter)
        read = await self._narrow(await self._prompts.read(request, scope, request_id), served, caller)
        return _sent_by(caller, read)

    async def read_length(
        self, model: str | None, letters: int, request_id: str | None = None, caller: Caller = ANYBODY
    ) -> RequestPrompt:
        """A prompt for a request whose text is not read: it matches nothing, and its length is a guess. Raises UnknownModel."""
        read = self.guess(await self._scope(model, caller.tenant_id, caller), letters, request_id, caller)
        return await self._narrow(read, model, caller)

    def guess(
        self, scope: Scope, letters: int, request_id: str | None = None, caller: Caller = ANYBODY
    ) -> RequestPrompt:
        """Like `read_length`, but in a known scope."""
        return _sent_by(caller, self._prompts.guess(scope, letters, request_id))

    def with_session(self, read: RequestPrompt, headers: Sequence[tuple[bytes, bytes]]) -> RequestPrompt:
        """The prompt, assigned to the session that the request's headers name, if any. Header names are in lower
        case."""
        given: dict[bytes, bytes] = {}
        for name, value in headers:
            if value and name in self._session_headers:
                given.setdefault(name, value)
        found = (given[name].decode("latin-1") for name in self._session_headers if name in given)
        session_id = next(filter(is_session_id, found), None) if given else None
        return read if session_id is None else replace(read, prompt=replace(read.prompt, session_id=session_id))

    async def _scope(self, model: str | None, tenant_id: str | None, caller: Caller) -> Scope:
        scope = await self._catalogue.scope_of(model, tenant_id, seen_by=caller.tenant_id)
        if scope is not None and not caller.may_use(model or scope.adapter_id or scope.model_id):
            model, scope = model or scope.model_id, None  # answer as if the model did not exist
        if scope is None:
            if model is None:
                raise InvalidValue("model is missing, and the fleet serves more than one; expected one of /v1/models")
            raise UnknownModel(f"the model {model[:200]!r} does not exist; /v1/models lists those that do")
        return scope

    async def _narrow(self, read: RequestPrompt, model: str | None, caller: Caller) -> RequestPrompt:
        """Leave out the workers of the pool that don't serve this name."""
        unfit = await self._catalogue.unfit_for(model, seen_by=caller.tenant_id)
        return replace(read, prompt=replace(read.prompt, select=Selector(unfit=unfit))) if unfit else read


def _sent_by(caller: Caller, read: RequestPrompt) -> RequestPrompt:
    """The prompt, assigned to the program that sent it, which is billed for the answer."""
    return replace(read, prompt=replace(read.prompt, program=caller.name)) if caller.is_proven else read
