"""What a client has of a streamed answer, and the events of other engines' answers that follow it without a seam."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import MOST_DATA_BYTES, Event, EventParser
from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chat_events import ChatEvents
from kvatlas_router.continuation.chunk import Chunk, read_chunk
from kvatlas_router.continuation.cuts import Cuts, Rest
from kvatlas_router.continuation.events import EventForm
from kvatlas_router.continuation.generate_events import GenerateEvents
from kvatlas_router.continuation.messages import MessageEvents
from kvatlas_router.continuation.reasons import CannotContinue, Why
from kvatlas_router.continuation.responses import ResponseEvents
from kvatlas_router.continuation.rest_request import (
    body_of_ids,
    body_of_rest,
    has_ids,
    stops_of,
)
from kvatlas_router.continuation.sent_answer import SentAnswer
from kvatlas_router.continuation.thoughts import END as END_OF_REASONING
from kvatlas_router.continuation.thoughts import Markers, Thoughts
from kvatlas_router.continuation.usage import WholeUsage, count
from kvatlas_router.tokens.text_request import Api, TextRequest

MOST_LETTERS = 1 << 20
"""A longer answer is not kept, and can't go on."""
MOST_WITHHELD_BYTES = 1 << 16
THINKING = "<think>"
"""How an answer with reasoning begins if its engine does not parse that; templates change or drop it."""
DONE = b"data: [DONE]\n\n"
_ERROR_MARKS = (b'"error"', b'"abort"', b'"response.failed"')
"""An event without a type has one of these if it is an error."""
_BLANK = (b"\n\n", b"\r\r", b"\r\n\r\n")


class Seam:
    """Reads the events that a client gets; `feed` returns them as the client gets them. They leave out what only the router
    asked for. After `resume`, events belong to another engine's answer, and become events of the first one's.

    `why`: why the answer can't go on, if it can't. `error`: the engine's error, which ends its answer; `withheld`: its events,
    which the client has not got. `events`: events with data that the client got. `ended`: so has the answer. `usage`: the
    whole answer's. `missing_end`: what else the client needs.
    """

    def __init__(self, text: TextRequest) -> None:
        self.error: EngineError | None = None
        self.withheld = b""
        self.events = 0
        self.ended = False
        self.why: Why | None = None
        self._text = text
        self.usage = WholeUsage()
        self._form = _form_of(text.api)
        self._chat_events = ChatEvents() if text.api is Api.CHAT else None
        self._generate = GenerateEvents() if text.api is Api.GENERATE else None
        self._chat = text.api.is_conversation
        options = text.body.get("stream_options")
        self._shows_usage = isinstance(options, dict) and bool(options.get("continuous_usage_stats"))
        self._with_ids = has_ids(text)
        self._hides_ids = text.api not in (Api.TOKENS, Api.GENERATE) and text.body.get("return_token_ids") is not True
        self._stops = stops_of(text)
        self._parser = EventParser()
        self._identity: dict[str, bytes] = {}
        self._sent = SentAnswer()
        self._prompt_ids = array("q")
        """The prompt's token ids; empty unless this is a chat whose answer can continue by ids."""
        self._thoughts = Thoughts()
        self._cuts = Cuts(text, self._sent, self._thoughts)
        self._is_read = bool(text.body.get("tools") or text.body.get("logprobs") or text.media_items)
        """The engine reads more than text from the tokens of this conversation."""
        self._resumed = self._speaks = self._by_ids = False
        self._misfit = Why.TEMPLATE
        self._least_prompt_tokens = 0
        """Prompt tokens that the next engine should count; if it counts fewer, its template left something out."""
        self._base_letters = 0
        self._finished = self._has_usage = False

    @property
    def reached(self) -> tuple[int, bool, bool]:
        """How far the client's answer has come: no later one is equal unless it had no progress."""
        return self._sent.letters + len(self._sent.ahead), self._finished, self._has_usage

    # ------------------------------------------------------------ events

    def feed(self, passed: bytes) -> bytes:
        """Whole events as the client gets them. Raises CannotContinue if they don't follow what it has."""
        if not self._parser.in_event and not self._parser.ended_in_cr and _is_plain(passed):
            return self._pass(Event("", passed[6:-2], False, len(passed)), passed)
        out: list[bytes] = []
        at = 0
        for event in self._parser.feed(passed):
            out.append(self._pass(event, passed[at : event.end]))
            at = event.end
        if at < len(passed):
            self._give_up(Why.LONG)  # only an event without end passes in parts
            out.append(passed[at:])
        return b"".join(out)

    def end(self, rest: bytes) -> bytes:
        """The last bytes of an engine's stream, as `feed`. Its last event may lack its empty line."""
        if rest and not rest.endswith(_BLANK):
            rest += b"\n" if rest.endswith((b"\n", b"\r")) else b"\n\n"
        return self.feed(rest)

    def _pass(self, event: Event, raw: bytes) -> bytes:
        if event.data is None:
            return raw
        if self.error is None and not event.cut and (event.type or any(mark in event.data for mark in _ERROR_MARKS)):
            self.error = EngineError.of_event(event.type, event.data)
        if self.error is not None:
            if len(self.withheld) < MOST_WITHHELD_BYTES:
                self.withheld += raw
            return b""
        if event.data.strip() == b"[DONE]":
            self.ended = True
            raw = raw if self._form is None else self._form.end
        elif event.cut:
            self._give_up(Why.LONG)
        elif self._resumed:
            raw = self._follow(raw, self._read(event.data))
        elif self._form is None:
            raw = self._begin(raw, self._read(event.data))
        else:
            if (chunk := self._form.read(event, raw)) is not None:
                raw = self._begin(raw, chunk)
            self.ended = self.ended or self._form.is_end(event)
        self.events += bool(raw)
        return raw

    def _read(self, data: bytes) -> Chunk:
        return read_chunk(data) if self._generate is None else self._generate.read(data)

    def _begin(self, raw: bytes, chunk: Chunk) -> bytes:
        """An event of the first engine's answer."""
        self._identity = self._identity or edits.identity_of(raw)
        if chunk.usage is not None:
            self.usage.learn(chunk.usage, first=True)
        if self._chat_events is not None:
            self._chat_events.learn(raw, chunk)
            self._prompt_ids.extend(chunk.prompt_ids or ())
        if chunk.other is not None:
            self._give_up(chunk.other)
        if chunk.reasoning or self._thoughts.thinks:
            chunk = self._join(chunk)
            if chunk.reasoning and chunk.usage is not None:
                self.usage.think()
        self._record(chunk)
        if not chunk.says and chunk.is_plain and chunk.ids is not None and self._hides_ids:
            return b""  # engines send it for its ids alone
        return self._shown(raw, chunk) if self._form is None else raw

    def _join(self, chunk: Chunk) -> Chunk:
        try:
            return replace(chunk, text=self._thoughts.join(chunk.reasoning, chunk.text))
        except CannotContinue as cannot:
            self._give_up(cannot.why or Why.REASONING)
            return chunk

    def _follow(self, raw: bytes, chunk: Chunk) -> bytes:
        """An event of another engine's answer. Empty if the client has it."""
        if chunk.usage is not None:
            self.usage.learn(chunk.usage, first=False)
            if (count(chunk.usage, "prompt_tokens") or 0) < self._least_prompt_tokens:
                raise CannotContinue(self._misfit)
        if chunk.opens:
            return b""
        if self._form is not None:
            self._form.finish(chunk)
        if not chunk.has_choice:
            if self._has_usage:
                return b""
            self._record(chunk)
            if self._form is not None:
                self.usage.cap(self._cuts.most)
                return self._form.usage(self.usage.sum(chunk.usage or {}))
            return self._shown(edits.with_identity(raw, self._identity), chunk)
        sent = self._sent
        if self._thoughts.markers is not None:
            chunk = self._parse(chunk)
        elif chunk.reasoning or self._thoughts.inside:
            if self._thoughts.inside and chunk.usage is not None:
                self.usage.think_more(chunk.usage)
            chunk = replace(chunk, text=self._thoughts.follow(chunk.reasoning, chunk.text))
        if chunk.other is not None:
            if sent.ahead or self._finished:
                raise CannotContinue(Why.DIVERGED)
            self._give_up(chunk.other)
        has_it, rest = self._finished, chunk.text
        if sent.silent and not sent.ahead and not chunk.text and (chunk.finish is None or has_it):
            sent.silent -= 1
            return self._drop(chunk)
        if sent.silent and not self._may_change(chunk) and not sent.ahead:
            raise CannotContinue(Why.DIVERGED)
        if sent.ahead or self._finished:
            rest = self._repeat(chunk)
            if not rest and (has_it or chunk.finish is None):
                return self._drop(chunk)
            raw = self._cut(raw, chunk, rest)
            if not rest and not self._hides_ids:
                raw = edits.with_ids(raw, ())
        self._record(chunk)
        if chunk.text:
            self._speaks, sent.silent = True, 0
        elif self._stops and not self._speaks and chunk.finish is None and self._may_change(chunk):
            return b""  # it holds back letters, as the first engine did
        if self._form is not None:
            if chunk.other is not None:
                raise CannotContinue(chunk.other)
            return self._form.part(*self._thoughts.write(rest), last=chunk.finish is not None)
        if self._generate is not None:
            return self._generate.write(raw, self.usage.sum(chunk.usage or {}), repeats=rest != chunk.text)
        if self._by_ids and self._chat_events is not None:
            if self._thoughts.markers is not None and not rest and chunk.finish is None and self._hides_ids:
                return b""
            return self._shown(self._chat_events.part(raw, chunk, *self._thoughts.write(rest)), chunk)
        self._thoughts.write(rest)
        raw = edits.without_role(edits.with_identity(raw, self._identity))
        raw = edits.without_prompt_ids(edits.with_offsets(raw, self._base_letters))
        return self._shown(raw, chunk)

    def _cut(self, raw: bytes, chunk: Chunk, rest: str) -> bytes:
        """The event with no more than this of its text."""
        if not chunk.reasoning:
            return edits.with_text(raw, rest.replace(END_OF_REASONING, ""))
        thought, ended, content = rest.partition(END_OF_REASONING)
        if not ended and END_OF_REASONING in chunk.text:
            thought, content = "", rest
        said = dict.fromkeys(chunk.thinks_in, thought) if thought else {}
        return edits.with_delta(raw, said | ({"content": content} if content else {}))

    def _drop(self, chunk: Chunk) -> bytes:
        """Of a part that the client has, only what ends it."""
        self._record(chunk)
        return b"" if self._form is None or chunk.finish is None else self._form.part("", "", last=True)

    def _parse(self, chunk: Chunk) -> Chunk:
        """A part of a completion as one of the conversation, and its reasoning's tokens."""
        inside, markers = self._thoughts.inside, self._thoughts.markers
        assert markers is not None
        text = self._thoughts.read(chunk.text, last=chunk.finish is not None)
        if inside and chunk.usage is not None:
            ids, end = chunk.ids or (), markers.ids[1]
            behind = len(ids) - ids.index(end) if end in ids else int(not self._thoughts.inside)
            self.usage.think_on(max(0, behind - (self._text.kind is EngineKind.SGLANG)))  # SGLang counts the end, too
        return replace(chunk, text=text)

    def _repeat(self, chunk: Chunk) -> str:
        """The part's text behind what the client has."""
        sent = self._sent
        if sent.ahead.startswith(chunk.text):
            sent.ahead = sent.ahead[len(chunk.text) :]
            rest = ""
        elif chunk.text.startswith(sent.ahead) and self._may_change(chunk):
            rest, sent.ahead = chunk.text[len(sent.ahead) :], ""
        else:
            raise CannotContinue(Why.DIVERGED)
        if rest and self._finished:
            if self._form is None:
                raise CannotContinue(Why.DIVERGED)
            rest = ""  # its tokens were guessed, so it got no end at the limit
        if chunk.finish is not None and sent.ahead:
            if not (self._stops and chunk.finish == "stop"):
                raise CannotContinue(Why.DIVERGED)
            sent.ahead = ""  # the client has the beginning of a stop string, which engines cut off
        return rest

    def _may_change(self, chunk: Chunk) -> bool:
        """True if the client gets nothing of the event that belongs to single tokens."""
        if self._generate is not None:
            return self._generate.whole is not False
        return chunk.is_plain and (chunk.ids is None or self._hides_ids)

    def _record(self, chunk: Chunk) -> None:
        if not chunk.has_choice:
            self._has_usage = self._has_usage or chunk.usage is not None
            self._finished = self._finished or self._form is not None
            return
        self._finished = self._finished or chunk.finish is not None
        if self.why is not None or chunk.opens:
            return
        sent = self._sent
        before = sent.end_of(len(sent.parts)).tokens or self.usage.before
        counted = None if chunk.usage is None else count(chunk.usage, "completion_tokens")
        some = int(bool(chunk.text)) if chunk.ids is None else len(chunk.ids)
        tokens = before + some if counted is None else self.usage.before + counted
        if chunk.ids is None:
            del self._prompt_ids[:]
        sent.add(chunk.text, tokens, chunk.ids or (), last=chunk.finish is not None)
        if sent.letters > MOST_LETTERS:
            self._give_up(Why.LONG)

    def _shown(self, raw: bytes, chunk: Chunk) -> bytes:
        """The event without what only the router asked for, and with the whole answer's usage."""
        if self._hides_ids:
            raw = edits.without_token_ids(raw)
        if chunk.usage is None:
            return raw
        if chunk.has_choice and not self._shows_usage:
            return edits.without_usage(raw)
        return edits.with_usage(raw, self.usage.sum) if self._resumed else raw

    # ------------------------------------------------------------ the rest

    @property
    def missing_end(self) -> bytes | None:
        """The last event that the client lacks, if it has all of the answer; empty if it has that too. None: it lacks more."""
        if self.ended:
            return b""
        counts = self._has_usage or not self._text.wants_usage or self._generate is not None
        complete = self._finished and counts
        if complete and self.why in (None, Why.REASONING, Why.TOOL_CALL):
            return DONE if self._form is None else self._form.end
        return None

    def is_at_limit(self, tokens: int) -> bool:
        """True if no token may follow these."""
        return self._cuts.is_at_limit(tokens)

    def rest(self, most_parts: int | None = None) -> Rest:
        """What the client lacks, once its engine is gone. `most_parts`: the next engine gets no more. Raises CannotContinue."""
        if self.why is not None:
            raise CannotContinue(self.why)
        sent, text = self._sent, self._sent.text
        can_write = self._chat_events is not None and self._chat_events.can_write
        by_ids = can_write and bool(self._prompt_ids) and not self._is_read
        reasoned = self._thoughts.reasoned
        if not by_ids and self._chat and text.lstrip().startswith(THINKING):
            raise CannotContinue(Why.REASONING)
        if self._generate is not None and self._generate.whole is None:
            most_parts = 0
        kept, at = self._cuts.find(text, by_ids=by_ids, finished=self._finished, most_parts=most_parts)
        end = sent.end_of(kept)
        tokens = end.tokens
        reasoned = reasoned and not (by_ids and END_OF_REASONING in text[:at])
        if by_ids:
            return Rest(kept, tokens, by_ids=True, reasoned=reasoned)
        longest = max(map(len, self._stops), default=1)
        lag = None if self._form is not None else min(longest - 1, tokens)
        return Rest(kept, tokens, lag, reasoned=reasoned)

    def asks(self, rest: Rest) -> Api:
        """The API of the request for the rest."""
        if rest.by_ids:
            return Api.COMPLETIONS
        return self._text.api if self._form is None else Api.CHAT

    def of_engines(self, kind: EngineKind, model_id: str) -> None:
        """Set what the engines are: it decides how they read a conversation."""
        self._text = self._text.of_engines(kind, model_id, self._text.tenant_id)

    @property
    def model_id(self) -> str | None:
        """The engines' model, once it is known."""
        return self._text.model_id

    def by_ids(self, rest: Rest) -> Rest:
        """The rest of a conversation whose template does not fit, if the ids of its prompt and its text are known. Raises
        CannotContinue."""
        if self._is_read or (self._chat_events is not None and not self._chat_events.can_write):
            raise CannotContinue(Why.TEMPLATE)
        return replace(rest, by_ids=True)

    @property
    def is_read(self) -> bool:
        """True if only an engine can read the answer's tokens, since they may be tool calls, or must have logprobs."""
        return self._is_read

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's token ids, if the first engine gave them."""
        return self._prompt_ids

    def with_markers(self, rest: Rest, markers: Markers, prompt_ids: Sequence[int], ids: Sequence[int]) -> Rest | None:
        """The rest by these ids, if they agree with what the client has: so the model does mark its reasoning like that."""
        inside = markers.is_open([*prompt_ids, *ids])
        if rest.parts and inside != self._is_inside(rest):
            return None
        end = ids.index(markers.ids[1]) if markers.ids[1] in ids else len(ids)
        sglang = self._text.kind is EngineKind.SGLANG  # counts the markers, too
        apart = 0 if sglang or markers.is_open(prompt_ids) else 1
        thought = min(len(ids), end + 1) if sglang else max(0, end - apart)
        return replace(rest, by_ids=True, markers=markers, inside=inside, apart=apart, thought=thought)

    def _is_inside(self, rest: Rest) -> bool:
        return self._thoughts.reasoned and END_OF_REASONING not in self.text_of(rest)

    def body_of_ids(self, prompt_ids: Sequence[int], ids: Sequence[int], tokens: int, rest: Rest) -> dict[str, Any]:
        """The body for the rest by ids, if the engine gave none. `tokens`: as its engines counted `ids`, which are of the
        answer so far."""
        shown = {} if rest.markers is None else {"skip_special_tokens": False}
        return body_of_ids(self._text, prompt_ids, ids, tokens) | shown

    def body_of_raw(self, raw: str, tokens: int) -> dict[str, Any]:
        """The body of a chat for the rest of an answer with reasoning. `raw`: what the model has generated of it."""
        return body_of_rest(self._text, raw, (), tokens)

    def body(self, rest: Rest, tokens: int) -> dict[str, Any]:
        """The body that asks for the rest; `tokens`: of the answer so far. Raises CannotTokenize if it can't be known."""
        ids = self._sent.ids_of(rest.parts) if self._with_ids or rest.by_ids else []
        if rest.by_ids:
            return self.body_of_ids(self._prompt_ids, ids, tokens, rest)
        return body_of_rest(self._text, self.text_of(rest), ids, tokens)

    def ids_of(self, rest: Rest) -> Sequence[int]:
        """The token ids of the answer that the next engine gets, as far as the engines gave them."""
        return self._sent.ids_of(rest.parts)

    def trusts(self, rest: Rest, tokens: int) -> bool:
        """May this be the number of the tokens that were read from the answer's text? Parsers remove white space behind
        reasoning."""
        if rest.lag is None:
            return self._is_inside(rest) or self._thoughts.keeps
        return abs(rest.tokens - tokens) <= rest.lag

    def text_of(self, rest: Rest) -> str:
        """The answer that the next engine gets."""
        return self._sent.text_of(rest.parts)

    def resume(self, rest: Rest, tokens: int) -> None:
        """From now on, events belong to an answer to `body`."""
        sent = self._sent
        sent.repeat_from(rest.parts)
        self._base_letters = sent.letters
        self.usage.before = tokens
        self._by_ids = rest.by_ids
        self._thoughts.resume(rest.markers, inside=rest.inside, fresh=rest.parts == 0)
        if self._form is not None and rest.markers is not None:  # its engines count at the end
            self.usage.apart, self.usage.details = rest.apart, {"reasoning_tokens": rest.thought}
        self._misfit = Why.TEMPLATE if rest.is_known else Why.TOKENS
        exact = self._chat and not rest.by_ids and rest.lag == 0 and self.usage.prompt_tokens is not None
        self._least_prompt_tokens = (self.usage.prompt_tokens or 0) + tokens if exact else 0
        if self._generate is not None:
            self._generate.resume(sent.ids, sent.text_of(rest.parts))
        self._resumed, self._speaks = True, False
        self._parser = EventParser()
        self.error, self.withheld = None, b""

    def _give_up(self, why: Why) -> None:
        self.why = self.why or why
        self._sent.clear()


def _form_of(api: Api) -> EventForm | None:
    match api:
        case Api.MESSAGES:
            return MessageEvents()
        case Api.RESPONSES:
            return ResponseEvents()
    return None


def _is_plain(passed: bytes) -> bool:
    """True if it is one event with nothing but a JSON text, as almost all are. A parser takes several times as long."""
    if not (passed.startswith(b"data: {") and passed.endswith(b"}\n\n")):
        return False
    return passed.count(b"\n") == 2 and b"\r" not in passed and len(passed) < MOST_DATA_BYTES
