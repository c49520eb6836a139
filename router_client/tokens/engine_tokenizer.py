"""The engine's own tokenizer over HTTP: vLLM's `/tokenize` (extra `router`). Exact, at the price of a round trip.

SGLang's `/tokenize` takes text only; a chat for it needs a local tokenizer.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import httpx

from router_client.tokens.text_request import Api, TextRequest
from router_client.tokens.tokenizer import CannotTokenize, Why

MOST_ASKED = 2
"""Engines asked for one request, one after another, if they don't answer."""

_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)

Engines = Callable[[TextRequest], Awaitable[Sequence[str]]]


class EngineTokenizer:
    """Asks engines in turn. `engines`: gives the base URLs of the engines that serve a request's model now."""

    def __init__(self, client: httpx.AsyncClient, engines: Engines) -> None:
        """The caller keeps the client, and closes it."""
        self._client = client
        self._engines = engines
        self._turn = count()

    async def token_ids(self, request: TextRequest) -> Sequence[int]:
        """Raises CannotTokenize."""
        urls = await self._engines(request)
        if not urls:
            raise CannotTokenize(Why.FAILED, "no engine to ask for token ids")
        turn = next(self._turn)
        body = _tokenize_body(request)
        for asked in range(min(MOST_ASKED, len(urls))):
            url = f"{urls[(turn + asked) % len(urls)].rstrip('/')}/tokenize"
            try:
                answer = await self._client.post(url, json=body)
            except httpx.HTTPError as error:
                why = f"{url}: {error or type(error).__name__}"
                continue
            if answer.status_code < 500:
                return _read_tokens(url, answer)
            why = f"{url}: status {answer.status_code}"
        raise CannotTokenize(Why.FAILED, why)


def _tokenize_body(request: TextRequest) -> dict[str, Any]:
    body = request.body
    if request.api is Api.CHAT:
        fields = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    else:
        fields = {"prompt": request.prompt, "add_special_tokens": body.get("add_special_tokens", True)}
    return {"model": request.model, **fields} if request.model else fields


def _read_tokens(url: str, answer: httpx.Response) -> Sequence[int]:
    if answer.status_code in (404, 405):
        raise CannotTokenize(Why.UNSUPPORTED, f"{url}: status {answer.status_code}; use a local tokenizer")
    try:
        tokens = answer.json()["tokens"] if answer.status_code == 200 else None
    except (ValueError, LookupError, TypeError):
        tokens = None
    if not isinstance(tokens, list):
        raise CannotTokenize(Why.FAILED, f"{url}: status {answer.status_code} without token ids")
    return tokens
