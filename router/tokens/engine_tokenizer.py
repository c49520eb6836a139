"""The engine's own tokenizer over HTTP: vLLM's `/tokenize` (extra `router`). Exact, at the price of a round trip.

A chat with images is asked of vLLM's `/v1/chat/completions/render` (0.33, with `--enable-scale-out`): it has the tokens
and hashes by which the engine knows them, at the price of their processing. An engine without it gives the tokens of the
messages before the first image. SGLang's `/tokenize` takes text only; a chat for it needs a local tokenizer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from math import inf
from typing import Any

from kvatlas.blocks.media import MediaItem
from kvatlas.engine_access import KEY_CURE, REFUSED
from kvatlas.errors import InvalidValue
from kvatlas_router.tokens.text_request import Api, TextRequest, media_parts
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens, Tokens, Why
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient, Reply

MOST_ASKED = 2
"""Engines asked for one request, one after another, if they don't answer."""
PATIENCE_S = 0.1
"""After that another engine is asked too, if this one answered nobody in this time: one that is only busy would not be helped
by asking all engines twice. Not for images, whose processing takes its time."""
REST_S = 5.0
"""An engine that answered nobody in that time, or failed, is asked after all others for this long."""
ELSEWHERE = (401, 403, 408, 429)
"""Refusals that say nothing about the request: another engine is asked, as after a server error."""

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

_RENDER = "/v1/chat/completions/render"
_NO_RENDER = (403, 404, 405, 501)
"""Statuses of an engine that does not render chats; it is not asked again for ASK_AGAIN_S."""
ASK_AGAIN_S = 60.0

Engines = Callable[[TextRequest], Awaitable[Sequence[str]]]


class EngineTokenizer:
    """Asks engines in turn. `engines`: gives the base URLs of the engines that serve a request's model now."""

    def __init__(
        self,
        client: EngineClient,
        engines: Engines,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller keeps the client, and closes it."""
        self._client = client
        self._engines = engines
        self._patience_s = patience_s
        self._clock = clock
        self._turn = count()
        self._resting: dict[str, float] = {}
        """Until when engines are asked last, by URL."""
        self._answered: dict[str, float] = {}
        """When engines answered last, by URL."""
        self._asked_in_vain: dict[str, float] = {}  # when, by the address of an engine that does not render chats

    async def token_ids(self, request: TextRequest) -> Tokens:
        """Raises CannotTokenize."""
        urls = [url.rstrip("/") for url in await self._engines(request)]
        if not urls:
            raise CannotTokenize(Why.FAILED, "no engine to ask for token ids")
        if request.media_items:
            return await self._media_tokens(request, urls)
        return _read_tokens(*await self._ask(urls, "/tokenize", _tokenize_body(request)))

    async def _media_tokens(self, request: TextRequest, urls: Sequence[str]) -> PromptTokens:
        now = self._clock()
        able = [url for url in urls if now - self._asked_in_vain.get(url, -ASK_AGAIN_S) >= ASK_AGAIN_S]
        if able:
            url, answer = await self._ask(able, _RENDER, _render_body(request))
            if answer.status not in _NO_RENDER:
                return _read_rendered(url, answer)
            self._asked_in_vain = {url: at for url, at in self._asked_in_vain.items() if now - at < ASK_AGAIN_S}
            self._asked_in_vain[url.removesuffix(_RENDER)] = now
        body = _tokenize_body(request)
        messages = request.messages
        body["messages"] = messages[: next(i for i, one in enumerate(messages) if media_parts(one.get("content")))]
        if not body["messages"]:
            raise CannotTokenize(Why.UNSUPPORTED, "the first message has images, and no engine renders chats")
        body["add_generation_prompt"] = False
        body.pop("continue_final_message", None)
        return PromptTokens(_read_tokens(*await self._ask(urls, "/tokenize", body)), cut=True)

    async def _ask(self, urls: Sequence[str], path: str, body: dict[str, Any]) -> tuple[str, Reply]:
        """The address asked, and what it answered. Raises CannotTokenize if no engine answers."""
        left, why = list(islice(self._in_turn(urls), MOST_ASKED)), ""
        patience_s = None if path == _RENDER else self._patience_s
        asked: dict[asyncio.Task[Reply], str] = {}
        try:
            while asked or left:
                if left:
                    engine = left.pop(0)
                    asked[asyncio.create_task(self._client.call("POST", engine + path, body))] = engine
                await self._wait(asked, patience_s if left else None)
                for task, engine in list(asked.items()):
                    if not task.done():
                        self._let_rest(engine)
                        continue
                    del asked[task]
                    answer, why = _outcome(task, engine + path)
                    if answer is not None and _is_answer(path, answer.status):
                        self._resting.pop(engine, None)
                        self._answered[engine] = self._clock()
                        return engine + path, answer
                    self._let_rest(engine)
        finally:
            for task in asked:
                task.cancel()
        raise CannotTokenize(Why.FAILED, why)

    async def _wait(self, asked: Mapping[asyncio.Task[Reply], str], patience_s: float | None) -> None:
        """Until one is done, or for `patience_s` after the last answer that anybody had of these engines."""
        done: set[asyncio.Task[Reply]] = set()
        waits = True
        while waits and not done:
            began = self._clock()
            done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            waits = any(self._answered.get(engine, -inf) > began for engine in asked.values())

    def _in_turn(self, urls: Sequence[str]) -> Iterator[str]:
        """Each once, those that rest last."""
        first, now, resting = next(self._turn), self._clock(), []
        for place in range(first, first + len(urls)):
            url = urls[place % len(urls)]
            if self._resting.get(url, now) > now:
                resting.append(url)
            else:
                yield url
        yield from resting

    def _let_rest(self, url: str) -> None:
        now = self._clock()
        self._resting = {other: until for other, until in self._resting.items() if until > now}
        self._resting[url] = now + REST_S


def _outcome(asked: asyncio.Task[Reply], url: str) -> tuple[Reply | None, str]:
    """The answer, if there is one, and a line for an answer that is no good."""
    try:
        answer = asked.result()
    except EngineAway as error:
        return None, str(error)
    cure = f"; {KEY_CURE}" if answer.status in REFUSED else ""
    return answer, f"{url}: status {answer.status}{cure}"


def _is_answer(path: str, status: int) -> bool:
    """False for a status that says nothing about the request."""
    if path == _RENDER and status in _NO_RENDER:
        return True
    return status < 500 and status not in ELSEWHERE


def _render_body(request: TextRequest) -> dict[str, Any]:
    """The chat itself, without the images' tensors in the answer: `mm_payload`, before that `return_mm_kwargs`."""
    kept = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
    return {**kept, "mm_payload": "none", "return_mm_kwargs": False}


def _tokenize_body(request: TextRequest) -> dict[str, Any]:
    body = request.body
    if request.api is Api.CHAT:
        fields = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    else:
        fields = {"prompt": request.prompt, "add_special_tokens": body.get("add_special_tokens", True)}
    return {"model": request.model, **fields} if request.model else fields


def _read_tokens(url: str, answer: Reply) -> Sequence[int]:
    if answer.status in (404, 405):
        raise CannotTokenize(Why.UNSUPPORTED, f"{url}: status {answer.status}; use a local tokenizer")
    try:
        tokens = answer.json()["tokens"] if answer.status == 200 else None
    except (ValueError, LookupError, TypeError):
        tokens = None
    if not isinstance(tokens, list):
        raise CannotTokenize(Why.FAILED, f"{url}: status {answer.status} without token ids")
    return tokens


def _read_rendered(url: str, answer: Reply) -> PromptTokens:
    """From vLLM's GenerateRequest: `token_ids`, and in `features` hashes and places by modality."""
    try:
        rendered = answer.json() if answer.status == 200 else {}
        tokens, features = rendered.get("token_ids"), rendered.get("features") or {}
        media = [
            MediaItem(name, place["offset"], place["length"])
            for modality, names in features.get("mm_hashes", {}).items()
            for name, place in zip(names, features["mm_placeholders"][modality], strict=True)
        ]
    except (ValueError, LookupError, TypeError, AttributeError, InvalidValue):
        tokens = None
    if not isinstance(tokens, list) or not media:
        raise CannotTokenize(Why.FAILED, f"{url}: status {answer.status} without token ids and media hashes")
    return PromptTokens(tokens, media)
