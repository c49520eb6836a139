"""The engine's own tokenizer over HTTP (extra `router`): exact, at the cost of a round trip.

Conversations go to vLLM's `/render` (0.33, with `--enable-scale-out`), which returns exactly what the engine computes,
including its hashes of images. For engines without it, and for SGLang, `/tokenize` is used; if there are images, only for the
messages before the first one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any

import orjson

from kvatlas.engine_access import KEY_CURE, REFUSED
from kvatlas.runtime.background_task import wait_for_first
from kvatlas_router.tokens.engine_questions import (
    RENDER_PATHS,
    Question,
    question_before_media,
    read_rendered,
    read_tokens,
    render_question,
    tokenize_question,
)
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens, Tokens, Why
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient, Reply

MOST_ASKED = 2
"""Maximum number of engines that are asked, in turn, about one request if they don't answer."""
PATIENCE_S = 0.1
"""If an engine has given no answer at all for this long, another one is asked too. An engine that is merely busy gets more
time, since asking two engines about everything would not help it. Does not apply to images, which take time to process."""
REST_S = 5.0
"""How long an engine that failed, or gave no answer within PATIENCE_S, is asked only after all others."""
ELSEWHERE = (401, 403, 408, 429)
"""Refusals that prove nothing about the request, so another engine is asked, as after a server error."""

_NO_RENDER = (403, 404, 405, 501)
"""HTTP statuses that show that an engine does not render requests. It is not asked again for ASK_AGAIN_S."""
ASK_AGAIN_S = 60.0

Engines = Callable[[TextRequest], Awaitable[Sequence[str]]]


class EngineTokenizer:
    """Asks engines in turn. `engines` gives the base URLs of the engines that now serve a request's model."""

    def __init__(
        self,
        client: EngineClient,
        engines: Engines,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines`: their URLs without a slash at the end. The caller owns the client and closes it."""
        self._client = client
        self._engines = engines
        self._patience_s = patience_s
        self._clock = clock
        self._turn = count()
        self._resting: dict[str, float] = {}
        """Times until which engines are asked last, by URL."""
        self._answered: dict[str, float] = {}
        """Times of engines' last answers, by URL."""
        self._asked_in_vain: dict[str, float] = {}  # by URL: when an engine that does not render requests was asked

    async def token_ids(self, request: TextRequest) -> Tokens:
        """Raises CannotTokenize."""
        urls = await self._engines(request)
        if not urls:
            raise CannotTokenize(Why.NO_ENGINE, "no engine to ask for token ids")
        able = self._renderers(urls)
        question = render_question(request) if able else None
        if question is None:
            return await self._tokenize(request, urls)
        if (rendered := await self._render(question, able, has_media=request.media_items > 0)) is not None:
            return rendered
        failed = [url for url in able if url in self._resting]
        tokens = await self._tokenize(request, urls)
        self._remember(failed)  # these engines do answer other calls
        return tokens

    async def _tokenize(self, request: TextRequest, urls: Sequence[str]) -> Tokens:
        has_media = request.media_items > 0
        question = question_before_media(request) if has_media else tokenize_question(request)
        engine, answer = await self._ask(urls, question)
        ids = read_tokens(request, engine + question.path, answer.status, _decode(answer))
        return PromptTokens(ids, cut=True) if has_media else ids

    async def _render(self, question: Question, urls: Sequence[str], *, has_media: bool) -> PromptTokens | None:
        """The rendered request; None if no engine renders it. `has_media`: wait longer, since images take time."""
        try:
            engine, answer = await self._ask(urls, question, patient=has_media)
        except CannotTokenize:
            return None
        status = answer.status
        tokens = read_rendered(_decode(answer)) if status == 200 else None
        if tokens is not None and has_media and not tokens.media:
            tokens = None
        if status in _NO_RENDER or (status == 200 and tokens is None):
            self._remember([engine])
        return tokens

    def _renderers(self, urls: Sequence[str]) -> Sequence[str]:
        if not self._asked_in_vain:
            return urls
        now = self._clock()
        return [url for url in urls if now - self._asked_in_vain.get(url, -ASK_AGAIN_S) >= ASK_AGAIN_S]

    def _remember(self, without: Sequence[str]) -> None:
        if without:
            now = self._clock()
            self._asked_in_vain = {url: at for url, at in self._asked_in_vain.items() if now - at < ASK_AGAIN_S}
            self._asked_in_vain.update(dict.fromkeys(without, now))

    async def _ask(self, urls: Sequence[str], question: Question, *, patient: bool = False) -> tuple[str, Reply]:
        """The engine asked, and its answer. Raises CannotTokenize if no engine answers."""
        path = question.path
        left, why = self._next(urls), ""
        patience_s = None if patient else self._patience_s
        asked: dict[asyncio.Task[Reply], str] = {}
        try:
            while asked or left:
                if left:
                    engine = left.pop(0)
                    asked[asyncio.create_task(self._client.call("POST", engine + path, question.body))] = engine
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
                        return engine, answer
                    self._let_rest(engine)
        finally:
            for task in asked:
                task.cancel()
        raise CannotTokenize(Why.FAILED, why)

    async def _wait(self, asked: Mapping[asyncio.Task[Reply], str], patience_s: float | None) -> None:
        """Wait until one task finishes, or until none of these engines has answered for `patience_s`."""
        waits = True
        while waits:
            began = self._clock()
            await wait_for_first(asked, patience_s)
            waits = not any(task.done() for task in asked) and any(
                self._answered.get(engine, -inf) > began for engine in asked.values()
            )

    def _next(self, urls: Sequence[str]) -> list[str]:
        """The next engines to ask, up to MOST_ASKED. Those that rest come after all others."""
        first, resting = next(self._turn) % len(urls), self._resting
        if not resting:
            return [urls[(first + number) % len(urls)] for number in range(min(MOST_ASKED, len(urls)))]
        now = self._clock()
        return sorted([*urls[first:], *urls[:first]], key=lambda url: resting.get(url, now) > now)[:MOST_ASKED]

    def _let_rest(self, url: str) -> None:
        now = self._clock()
        self._resting = {other: until for other, until in self._resting.items() if until > now}
        self._resting[url] = now + REST_S


def _outcome(asked: asyncio.Task[Reply], url: str) -> tuple[Reply | None, str]:
    """The answer, if any, and a line for the error if it is unusable."""
    if isinstance(error := asked.exception(), EngineAway):
        return None, str(error)
    answer = asked.result()
    cure = f"; {KEY_CURE}" if answer.status in REFUSED else ""
    return answer, f"{url}: status {answer.status}{cure}"


def _is_answer(path: str, status: int) -> bool:
    """False for a status that proves nothing about the request."""
    if path in RENDER_PATHS and status in _NO_RENDER:
        return True
    return status < 500 and status not in ELSEWHERE


def _decode(answer: Reply) -> Any:
    """The answer's JSON; None if it is not JSON."""
    try:
        return orjson.loads(answer.body)  # a number too long for it is no token id either
    except ValueError:
        with suppress(ValueError, RecursionError):
            return answer.json()
    return None
