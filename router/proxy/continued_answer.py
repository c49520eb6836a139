"""One request's streamed answer, which another worker may continue if its engine dies."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.continuation.choice_seams import ChoiceSeams, seam_of
from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.parsed_answer import DERENDER, check_guide
from kvatlas_router.continuation.reasons import CannotContinue, ContinueMode, Why, why_not
from kvatlas_router.continuation.rest_request import counting_fields
from kvatlas_router.continuation.seam import Seam
from kvatlas_router.continuation.thoughts import Markers, ThoughtEnds, markers_of
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind
from kvatlas_router.proxy.counters import ContinuationCounters
from kvatlas_router.tokens.engine_questions import render_question
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import Api, TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize
from kvatlas_router.tokens.tokenizer import Why as WhyNoTokens
from router_client.learning.token_counts import Usage

_log = logging.getLogger("kvatlas_router.proxy")

TOKENS_WAIT_S = 10.0
"""Longest wait for late tokens that are needed to continue an answer; shorter if the request may wait less for a
worker."""
AGAIN_S = 0.05
PARSE_PAUSE = 9
"""Tokens that an engine has to parse repeatedly wait for this multiple of the time that the last parse took."""
_LATE = frozenset({WhyNoTokens.LATE.value, WhyNoTokens.BUSY.value})

KindOf = Callable[[Scope], Awaitable[EngineKind]]
AskEngine = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Posts a body to a path of the current engine, and returns the JSON of its answer; None if the engine refuses. Raises
EngineLost."""
ReadPrompt = Callable[[TextRequest], Awaitable[RequestPrompt]]


@dataclass(frozen=True, slots=True)
class _Next:
    """The request to another engine for the rest of the answer, with its API and body. `tokens`: how many tokens of the
    answer that engine gets as input."""

    rest: Rest
    tokens: int
    api: Api
    body: Mapping[str, Any]


@dataclass(slots=True)
class ContinuedAnswer:
    """`seam`: joins the engines' answers; None if the answer can't be continued, for the reason `why` (None: continuing
    is switched off). `goes_on`: the current engine is not the first one. `lost`: how the last engine's part ended."""

    request: ClientRequest
    counters: ContinuationCounters
    read_prompt: ReadPrompt
    kind_of: KindOf
    why: Why | None = None
    seam: Seam | ChoiceSeams | None = None
    goes_on: bool = False
    lost: str = ""
    _next: _Next | None = None
    _failure: tuple[EngineError, bytes] | None = None
    _reached: object = None
    _prompt: RequestPrompt | None = None
    _patient_until: float = 0.0
    _parse_at: float = 0.0

    @classmethod
    def of(
        cls,
        request: ClientRequest,
        mode: ContinueMode,
        counters: ContinuationCounters,
        read_prompt: ReadPrompt,
        kind_of: KindOf,
        ends: ThoughtEnds,
    ) -> "ContinuedAnswer":
        """The answer to a request that has not been sent yet. `ends`: those of its pool."""
        answer = cls(request, counters, read_prompt, kind_of)
        text = request.text
        if mode is ContinueMode.OFF or text is None or not text.streamed:
            return answer
        answer.why = Why.OBJECT if request.objects is not None and request.objects.ids else why_not(text, mode)
        if answer.why is None:
            answer.seam = seam_of(text, ends)
        return answer

    def fields(self, text: TextRequest, kind: EngineKind) -> Mapping[str, Any]:
        """Fields that a request for this answer, or for its rest, needs on this kind of engine."""
        if self.seam is None:
            return {}
        return counting_fields(text, kind, self.request.prompt_tokens)

    @property
    def may_go_on(self) -> bool:
        """True if another worker could continue the answer now."""
        return self.seam is not None and self.seam.why is None and not self._is_stuck(self.seam)

    @property
    def next_request(self) -> TextRequest | None:
        """The request for the rest; None: the client's own request is sent."""
        if self._next is None or self.request.text is None:
            return None
        return replace(self.request.text, api=self._next.api, body=self._next.body)

    def fit(self, *, readable: bool) -> None:
        """Check the answer that an engine has begun. Raises CannotContinue unless it is a stream of events, like the first
        one."""
        if readable:
            return
        if self._next is not None:
            raise CannotContinue(Why.UNREADABLE)
        if self.seam is not None:
            self.seam, self.why = None, Why.UNREADABLE

    def whole_usage(self, usage: Usage | None) -> Usage | None:
        """The whole answer's usage, computed from the last engine's usage."""
        if self.seam is None or (usage is not None and not self.goes_on):
            return usage
        return self.seam.usage.whole

    @property
    def awaits_choice(self) -> bool:
        """True if one choice has ended, and another engine must continue the next; see `ChoiceSeams`."""
        return self.seam is not None and self.seam.awaits_choice

    # ------------------------------------------------------------ after an engine died

    async def prepare(self, read: RequestPrompt, error: Exception | None = None) -> RequestPrompt:
        """The prompt for the rest, after `error` has ended the engine's part, or when the next choice is due. Raises
        CannotContinue."""
        self.lost = str(error) if error is not None else self.lost
        seam = self.seam
        if seam is None:
            raise CannotContinue(self.why)
        self._failure = None if seam.error is None else (seam.error, seam.withheld)
        if self._is_stuck(seam):
            raise CannotContinue(Why.SAME_TOKEN)
        rest = seam.rest()
        try:
            seam.builder.of_engines(await self.kind_of(read.prompt.scope), read.prompt.scope)
            self._prompt = read if self._prompt is None else self._prompt
            self._patient_until = time.monotonic() + min(TOKENS_WAIT_S, read.prompt.wait_s or TOKENS_WAIT_S)
            self._next, found = await self._ask_for(seam, rest)
            cuts = seam.builder.cuts
            while rest.parts and rest.lag is None and cuts.is_at_limit(self._next.tokens):  # a guess that is too high
                rest = seam.rest(rest.parts - 1)
                self._next, found = await self._ask_for(seam, rest)
        except CannotTokenize as cannot:
            raise CannotContinue(Why.TEMPLATE) from cannot
        except (InvalidValue, UnknownModel, Unreachable) as away:
            raise CannotContinue(Why.NO_WORKER) from away
        return found

    async def _ask_for(self, seam: Seam | ChoiceSeams, rest: Rest) -> tuple[_Next, RequestPrompt]:
        """Build the request for the rest, and its prompt."""
        if rest.reasoned:
            return await self._ask_within_reasoning(seam, rest)
        tokens, api = await self._count(seam, rest), seam.builder.asks(rest)
        body = seam.builder.body(rest, tokens)
        found = await self._read(TextRequest.of(api, body))
        if not api.is_conversation:
            return _Next(rest, tokens, api, body), found
        first = await self._first_prompt()
        fits = _begins_with(found, first)
        if fits is None and rest.lag != 0 and {found.untokenized, first.untokenized} & _LATE:
            raise CannotContinue(Why.TOKENS)  # the next engine's count of the prompt would not show it, either
        if fits is False:
            rest, api = seam.builder.by_ids(rest), Api.COMPLETIONS
            ids = await self._ids_of_text(seam.builder.text_of(rest))
            body = seam.builder.body_of_ids(_ids_of(first), ids, tokens, rest)
            found = await self._read(TextRequest.of(api, body))
        rest = replace(rest, is_known=fits is not None)
        return _Next(rest, tokens, api, body), found

    async def _ask_within_reasoning(self, seam: Seam | ChoiceSeams, rest: Rest) -> tuple[_Next, RequestPrompt]:
        """Build the request for the rest of an answer with reasoning, whose markers must be known, and its prompt."""
        prompt_ids = seam.builder.prompt_ids or _ids_of(await self._first_prompt())
        for markers in markers_of(seam.builder.text.model_id):
            pair = await self._ids_of_text(markers.start + markers.end)
            if len(pair) != 2:
                continue
            markers = replace(markers, ids=pair)
            ids = seam.builder.ids_of(rest)
            if not rest.by_ids:
                raw = markers.raw(seam.builder.text_of(rest), opened=markers.is_open(prompt_ids))
                ids = await self._ids_of_text(raw) if rest.parts else []
                if not seam.builder.trusts(rest, len(ids)):
                    continue
            if (marked := seam.builder.with_markers(rest, markers, prompt_ids, ids)) is None:
                continue
            tokens = rest.counted(len(ids))
            if seam.builder.is_read:
                if (found := await self._ask_as_chat(seam, marked, markers, [*prompt_ids, *ids], tokens)) is not None:
                    return found
                continue
            if not seam.builder.knows_end(marked):
                break
            body = seam.builder.body_of_ids(prompt_ids, ids, tokens, marked)
            return _Next(marked, tokens, Api.COMPLETIONS, body), await self._read(TextRequest.of(Api.COMPLETIONS, body))
        raise CannotContinue(Why.REASONING)

    async def _ask_as_chat(
        self, seam: Seam | ChoiceSeams, rest: Rest, markers: Markers, ids: Sequence[int], tokens: int
    ) -> tuple[_Next, RequestPrompt] | None:
        """Build a chat that asks for the rest, which its engine parses; None if no partial message renders to these ids.
        Templates that begin the reasoning in the prompt don't begin it in a message, and some add a line break after it."""
        rest = replace(rest, by_ids=False, markers=None, inside=rest.inside or not rest.parts)
        if not rest.parts:
            body = seam.builder.body_of_raw("", 0)
            return _Next(rest, 0, Api.CHAT, body), await self._read(TextRequest.of(Api.CHAT, body))
        raw = markers.raw(seam.builder.text_of(rest), opened=True)
        for begun in (markers.start, markers.start + "\n"):
            body = seam.builder.body_of_raw(begun + raw, tokens)
            found = await self._read(TextRequest.of(Api.CHAT, body))
            if found.prompt_tokens is not None and list(found.prompt.tokens or ()) == list(ids):
                return _Next(rest, tokens, Api.CHAT, body), found
        return None

    async def check(self, ask: AskEngine) -> None:
        """Check that the engine that has begun to answer can parse the rest, if it has to. Raises CannotContinue, or whatever
        `ask` raises."""
        parsed = None if self.seam is None else self.seam.parsed
        if self._next is None or not self._next.rest.parsed or parsed is None or self.request.text is None:
            return
        rendering = render_question(self.request.text)
        assert rendering is not None
        check_guide(await ask(rendering.path, rendering.body))
        if (question := parsed.check_question) is not None:
            parsed.check(await ask(DERENDER, question))
        self._parse_at = 0.0

    async def feed(self, passed: bytes, ask: AskEngine) -> bytes:
        """The bytes that the client gets for those of the current engine. `ask` asks that engine to parse its tokens, if
        needed. Raises CannotContinue, or whatever `ask` raises."""
        assert self.seam is not None
        return self.seam.feed(passed) + await self._parse(ask)

    async def end_engine(self, rest: bytes, ask: AskEngine) -> bytes:
        """Like `feed`, but for the last bytes of the engine's stream."""
        assert self.seam is not None
        return self.seam.end(rest) + await self._parse(ask)

    async def _parse(self, ask: AskEngine) -> bytes:
        """The bytes that the client gets for unread tokens. Parsing takes at most a tenth of the time, except at the end,
        when all tokens are parsed."""
        seam = self.seam
        if not isinstance(seam, Seam) or (parsed := seam.parsed) is None or not parsed.is_unread:
            return b""
        began = time.monotonic()
        if began < self._parse_at and not parsed.has_unread_end:
            return b""
        answer = await ask(DERENDER, parsed.question)
        ended = time.monotonic()
        self._parse_at = ended + PARSE_PAUSE * (ended - began)
        return seam.read(answer)

    def join(self) -> None:
        """Make the engine that has begun to answer take over. Does nothing for the first engine."""
        if self._next is None or self.seam is None:
            return
        id, tokens = self.request.id or "without an id", self._next.tokens
        _log.info("request %s: its answer continues at another worker after %d tokens: %s", id, tokens, self.lost)
        self.seam.resume(self._next.rest, self._next.tokens)
        self._next, self.goes_on, self._reached = None, True, self.seam.reached
        self.counters.resumed += 1

    def stay(self) -> None:
        """Keep the current engine, since there is no other."""
        self._next = None

    def _is_stuck(self, seam: Seam | ChoiceSeams) -> bool:
        """True if the current engine took over at this point and got no further."""
        return self.goes_on and self._reached == seam.reached

    async def end(self, why: Why | None) -> None:
        """End the client's answer as its engine did."""
        if why is not None:
            self.counters.count(why)
            id = self.request.id or "without an id"
            _log.info("request %s: its answer ends with an error, because %s", id, CannotContinue(why))
        failure, seam = self._failure, self.seam
        if seam is not None and seam.error is not None:
            failure = seam.error, seam.withheld
        if failure is not None:
            await self.request.end_failed(*failure)
        else:
            await self.request.break_off(ErrorKind.BAD_GATEWAY, self.lost)

    async def _count(self, seam: Seam | ChoiceSeams, rest: Rest) -> int:
        """The number of the answer's tokens that the next engine gets. Engines hold back text that may begin a stop string,
        so tokens that they have counted may have no text yet; in messages, tokens are not counted at all. In both cases, the
        text is tokenized."""
        if rest.lag == 0 or not rest.parts:
            return rest.tokens
        counted = (await self._read_text(seam.builder.text_of(rest))).prompt_tokens
        return rest.tokens if counted is None else rest.counted(counted)

    async def _first_prompt(self) -> RequestPrompt:
        """The prompt of the client's request, with its tokens if they can be determined."""
        assert self._prompt is not None and self.request.text is not None
        if self._prompt.prompt_tokens is None:
            self._prompt = await self._read(self.request.text)
        return self._prompt

    async def _ids_of_text(self, text: str) -> Sequence[int]:
        return _ids_of(await self._read_text(text))

    async def _read_text(self, text: str) -> RequestPrompt:
        """A text that engines generated, as tokens."""
        asked = {"model": self.request.model, "prompt": text, "add_special_tokens": False}
        if self.request.text is not None and (salt := self.request.text.cache_salt) is not None:
            asked["cache_salt"] = salt  # it may name the tenant, and only that tenant's engines may read the text
        return await self._read(TextRequest.of(Api.COMPLETIONS, asked))

    async def _read(self, text: TextRequest) -> RequestPrompt:
        """The request's prompt. Late tokens are worth waiting for, because an answer that has begun can't be requested
        again."""
        while (read := await self.read_prompt(text)).untokenized in _LATE and time.monotonic() < self._patient_until:
            await asyncio.sleep(AGAIN_S)
        return read


def _begins_with(longer: RequestPrompt, prompt: RequestPrompt) -> bool | None:
    """True if the prompt that includes a part of the answer begins with `prompt`; None if their tokens are not known.
    Templates may add something after a prompt, such as `<think>`, that they leave out before a partial answer."""
    if longer.prompt_tokens is None or prompt.prompt_tokens is None:
        return None
    first, whole = prompt.prompt.tokens, longer.prompt.tokens
    return None if first is None or whole is None else list(whole[: len(first)]) == list(first)


def _ids_of(prompt: RequestPrompt) -> Sequence[int]:
    """The prompt's token ids. Raises CannotContinue if they are not known."""
    if prompt.prompt_tokens is None or prompt.prompt.tokens is None:
        raise CannotContinue(Why.TOKENS)
    return list(prompt.prompt.tokens)
