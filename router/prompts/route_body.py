"""Reads the prompt from the body of a query, which is either an OpenAI request or the hints of `kvatlas.request`."""

import asyncio
from typing import Any

from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from kvatlas.request import Fallbacks, RequestHints
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader, UnknownModel
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import Api, TextRequest
from router_client.prompt import Prompt

MAX_HASHES = 16_384
"""Enough for a million tokens in blocks of 64; reading them takes about 0.1 s on one core."""


class RouteBodyReader:
    """Reads prompts given as messages, text, token ids or block hashes."""

    def __init__(self, reader: RequestReader, catalogue: Catalogue) -> None:
        self._reader = reader
        self._catalogue = catalogue

    async def read(self, body: dict[str, Any], caller: Caller) -> tuple[RequestPrompt, TextRequest | None]:
        """The prompt in the scope of the caller's tenant, and the parsed request if the body has `messages` or `prompt`
        (OpenAI's form), otherwise None. Raises InvalidValue, UnknownModel or Unreachable."""
        claimed = body.pop("tenant_id", None)
        if claimed is not None and claimed != (caller.tenant_id or self._catalogue.tenant_id):
            raise InvalidValue("tenant_id names another tenant than the caller's; a body proves none")
        for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
            if name in body:
                text = TextRequest.of(api, self._salted(body, caller))
                return await self._reader.read(text, None, caller), text
        for name in ("block_hashes", "blocks"):
            if isinstance(hashes := body.get(name), list) and len(hashes) > MAX_HASHES:
                raise InvalidValue(
                    f"{name} has {len(hashes)} hashes; expected at most {MAX_HASHES}, those of the first blocks"
                )
        # in a thread, which yields to others every 5 ms
        hints = await asyncio.to_thread(RequestHints.parse, body)
        seen_by = caller.tenant_id
        scope = await self._catalogue.scope_of(hints.model_id, caller.tenant_id, seen_by=seen_by)
        if scope is None and hints.model_id is None:
            raise InvalidValue("model_id is missing; the fleet serves more than one model, or none")
        prompt = await asyncio.to_thread(
            Prompt.of_hints, hints, _fallbacks(hints, scope, caller.tenant_id or self._catalogue.tenant_id)
        )
        if scope is None and not await self._catalogue.knows_pool(prompt.scope, seen_by=seen_by):
            raise UnknownModel(
                f"no worker serves model {prompt.scope.model_id[:200]!r} with tokenizer {prompt.scope.tokenizer_id[:200]!r}"
            )
        return RequestPrompt(prompt, prompt.input_tokens), None

    def _salted(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """The body with its tenant's cache salt, which is how the request must be sent."""
        if not caller.is_proven or not self._reader.salt_is_tenant:
            return body
        own = body.get("cache_salt")
        return {**body, "cache_salt": caller.salted(own if isinstance(own, str) and own else None)}


def _fallbacks(hints: RequestHints, scope: Scope | None, tenant_id: str) -> Fallbacks:
    """Values that the hints may omit. The model's name is enough: the fleet's records give its tokenizer and, for an
    adapter, its base model."""
    if scope is None:
        return Fallbacks(tenant_id=tenant_id)
    return Fallbacks(scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id)
