"""Joins the streamed answers of several engines into one: what the client has so far, and the events that follow it."""

import json
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chat_events import ChatEvents
from kvatlas_router.continuation.chunk import Chunk, read_chunk
from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.events import EventForm
from kvatlas_router.continuation.generate_events import GenerateEvents
from kvatlas_router.continuation.joined_events import JoinedEvents
from kvatlas_router.continuation.messages import MessageEvents
from kvatlas_router.continuation.parsed_answer import ParsedAnswer
from kvatlas_router.continuation.reasons import CannotContinue, Why
from kvatlas_router.continuation.responses import ResponseEvents
from kvatlas_router.continuation.rest_builder import RestBuilder
from kvatlas_router.continuation.sent_answer import SentAnswer
from kvatlas_router.continuation.thoughts import END as END_OF_REASONING
from kvatlas_router.continuation.thoughts import ThoughtEnds, Thoughts
from kvatlas_router.continuation.usage import WholeUsage, count
from kvatlas_router.tokens.text_request import Api, TextRequest

MOST_LETTERS = 1 << 20
"""A longer answer is not kept, and can't be continued."""
DONE = b"data: [DONE]\n\n"


class Seam(JoinedEvents):
    """Reads an engine's events. `feed` returns them for the client, without what only the router requested. After `resume`,
    the events come from another engine, and `feed` rewrites them as the first engine's.

    `identity`: that of the first engine's stream. `builder`: builds the request for the rest. `why`: why the answer can't be
    continued; None if it can. `ended`: the answer is complete. `usage`: that of the whole answer. `missing_end`: events that
    the client still needs.
    """

    awaits_choice = False
    """See `ChoiceSeams`."""

    def __init__(
        self,
        text: TextRequest,
        ends: ThoughtEnds | None = None,
        *,
        index: int = 0,
        prompt_ids: "array[int] | None" = None,
        parsed: ParsedAnswer | None = None,
    ) -> None:
        """`ends`: those of the request's pool; see `ThoughtEnds`. `index`: the choice's index in the client's events.
        `prompt_ids`: shared by all choices of an answer; its first event carries them. `parsed`: the answer's tokens, if it
        may contain tool calls that an engine can parse."""
        super().__init__()
        self._index = index
        self.ended = False
        self.why: Why | None = None
        self.usage = WholeUsage()
        self._form = _form_of(text.api)
        self._chat_events = ChatEvents() if text.api is Api.CHAT else None
        self._generate = GenerateEvents() if text.api is Api.GENERATE else None
        self._chat = text.api.is_conversation
        options = text.body.get("stream_options")
        self._shows_usage = isinstance(options, dict) and bool(options.get("continuous_usage_stats"))
        self._hides_ids = text.api not in (Api.TOKENS, Api.GENERATE) and text.body.get("return_token_ids") is not True
        self.identity: dict[str, bytes] = {}
        self._sent = SentAnswer()
        self._prompt_ids = array("q") if prompt_ids is None else prompt_ids
        """The prompt's token ids; empty unless this is a chat whose answer can be continued from token ids."""
        self._thoughts = Thoughts(ends or ThoughtEnds())
        self.builder = RestBuilder(
            text, self._sent, self._thoughts, self._prompt_ids, self._chat_events, self._generate, parsed, index=index
        )
        self.parsed = parsed
        self._needs_parser: ParsedAnswer | None = None
        """The answer, while its current engine does not parse it."""
        self._waiting: list[tuple[Event, bytes, bytes]] = []
        """Events that arrived after the ones still to be parsed."""
        self._last_usage: Mapping[str, Any] = {}
        self._resumed = self._speaks = self._by_ids = False
        self._misfit = Why.TEMPLATE
        self._least_prompt_tokens = 0
        """Prompt tokens that the next engine should count; if it counts fewer, its template left something out."""
        self._base_letters = 0
        self._finished = self._has_usage = False

    @property
    def reached(self) -> tuple[int, int, bool, bool]:
        """The client's progress, for comparison: it changes whenever anything new arrives."""
        has_call = self.parsed is not None and self.parsed.has_call
        ids = len(self.parsed.ids) + len(self.parsed.unread) if self.parsed is not None and has_call else 0
        return self._sent.letters + len(self._sent.ahead), ids, self._finished, self._has_usage

    @property
    def is_finished(self) -> bool:
        """True if the client has the finish reason."""
        return self._finished

    # ------------------------------------------------------------ events

    def _take(self, event: Event, data: bytes, raw: bytes) -> bytes:
        if self._needs_parser is not None and self._needs_parser.has_unread_end:
            self._waiting.append((event, data, raw))
            return b""
        if data.strip() == b"[DONE]":
            self.ended = True
            return raw if self._form is None else self._form.end
        if event.cut:
            self.give_up(Why.LONG)
        elif self._resumed:
            raw = self._follow(raw, self._read(data))
            return edits.with_index(raw, self._index) if self._index else raw
        elif self._form is None:
            return self._begin(raw, self._read(data))
        else:
            if (chunk := self._form.read(event, raw)) is not None:
                raw = self._begin(raw, chunk)
            self.ended = self.ended or self._form.is_end(event)
        return raw

    def _read(self, data: bytes) -> Chunk:
        if self._generate is not None:
            return self._generate.read(data)
        return read_chunk(data, 0 if self._resumed else self._index)

    def _begin(self, raw: bytes, chunk: Chunk) -> bytes:
        """An event of the first engine's answer."""
        self.identity = self.identity or edits.identity_of(raw)
        if chunk.usage is not None:
            self.usage.learn(chunk.usage, first=True)
        if self._chat_events is not None:
            self._chat_events.learn(raw, chunk)
            if not self._prompt_ids:  # engines may repeat the ids for each choice
                self._prompt_ids.extend(chunk.prompt_ids or ())
        self._learn_calls(chunk)
        if chunk.reasoning or self._thoughts.thinks:
            chunk = self._join(chunk)
            if chunk.reasoning and chunk.usage is not None:
                self.usage.learn_reasoning()
        self._record(chunk)
        if self._is_empty(chunk):
            return b""
        return self._shown(raw, chunk) if self._form is None else raw

    def _learn_calls(self, chunk: Chunk) -> None:
        """Read an event whose engine parses its tokens. The answer can't be continued from here if other parsers can't
        parse it."""
        parsed = self.parsed
        if parsed is not None:
            parsed.learn(chunk)
        may_go_on = parsed is not None and parsed.knows_ids
        if chunk.other is not None and not (may_go_on and chunk.other is Why.TOOL_CALL and chunk.calls):
            self.give_up(chunk.other)
        elif parsed is not None and parsed.has_call and not may_go_on:
            self.give_up(Why.TOOL_CALL)

    def _join(self, chunk: Chunk) -> Chunk:
        try:
            return replace(chunk, text=self._thoughts.join(chunk.reasoning, chunk.text))
        except CannotContinue as cannot:
            self.give_up(cannot.why or Why.REASONING)
            return chunk

    def _follow(self, raw: bytes, chunk: Chunk) -> bytes:
        """The bytes that the client gets for an event of another engine; empty if the client already has its
        content."""
        if chunk.usage is not None:
            self.usage.learn(chunk.usage, first=False)
            if (count(chunk.usage, "prompt_tokens") or 0) < self._least_prompt_tokens:
                raise CannotContinue(self._misfit)
        if self._needs_parser is not None and chunk.has_choice:
            self._needs_parser.add(chunk)
            self._last_usage = chunk.usage or {}
            return b""
        self._learn_calls(chunk)
        if chunk.opens:  # a choice that has not begun for the client
            raw = b"" if self.events else edits.without_prompt_ids(edits.with_identity(raw, self.identity))
            return self._shown(raw, chunk) if raw else b""
        if self._form is not None:
            self._form.finish(chunk)
        if not chunk.has_choice:
            if self._has_usage:
                return b""
            self._record(chunk)
            if self._form is not None:
                self.usage.cap(self.builder.cuts.most)
                return self._form.usage(self.usage.sum(chunk.usage or {}))
            return self._shown(edits.with_identity(raw, self.identity), chunk)
        sent = self._sent
        if self._thoughts.markers is not None:
            chunk = self._parse(chunk)
        elif chunk.reasoning or self._thoughts.inside:
            if self._thoughts.inside and chunk.usage is not None:
                self.usage.add_reasoning(chunk.usage)
            chunk = replace(chunk, text=self._thoughts.follow(chunk.reasoning, chunk.text))
        if chunk.other is not None and (sent.ahead or self._finished):
            raise CannotContinue(Why.DIVERGED)
        has_it, rest = self._finished, chunk.text
        if chunk.calls:
            sent.silent = 0
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
        elif self.builder.stops and not self._speaks and chunk.finish is None and self._may_change(chunk):
            return b""  # it holds back characters, as the first engine did
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
        if self._is_empty(chunk):
            return b""
        raw = edits.without_role(edits.with_identity(raw, self.identity))
        raw = edits.without_prompt_ids(edits.with_offsets(raw, self._base_letters))
        return self._shown(raw, chunk)

    def _cut(self, raw: bytes, chunk: Chunk, rest: str) -> bytes:
        """The event with only the given rest of its text."""
        if not chunk.reasoning:
            return edits.with_text(raw, rest.replace(END_OF_REASONING, ""))
        thought, ended, content = rest.partition(END_OF_REASONING)
        if not ended and END_OF_REASONING in chunk.text:
            thought, content = "", rest
        said = dict.fromkeys(chunk.thinks_in, thought) if thought else {}
        return edits.with_delta(raw, said | ({"content": content} if content else {}))

    def _drop(self, chunk: Chunk) -> bytes:
        """The bytes for a part that the client already has: only the part's end."""
        self._record(chunk)
        return b"" if self._form is None or chunk.finish is None else self._form.part("", "", last=True)

    def _parse(self, chunk: Chunk) -> Chunk:
        """A completion's part in the form of a conversation's part. Also counts its reasoning tokens."""
        inside, markers = self._thoughts.inside, self._thoughts.markers
        assert markers is not None
        text = self._thoughts.read(chunk.text, last=chunk.finish is not None)
        if inside and chunk.usage is not None:
            ids, end = chunk.ids or (), markers.ids[1]
            behind = len(ids) - ids.index(end) if end in ids else int(not self._thoughts.inside)
            counts_end = self.builder.text.kind is EngineKind.SGLANG
            self.usage.count_reasoning(max(0, behind - counts_end))
        return replace(chunk, text=text)

    def _repeat(self, chunk: Chunk) -> str:
        """The rest of the part's text after what the client has."""
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
            if not (self.builder.stops and chunk.finish == "stop"):
                raise CannotContinue(Why.DIVERGED)
            sent.ahead = ""  # the client has the beginning of a stop string, which engines cut off
        return rest

    def _may_change(self, chunk: Chunk) -> bool:
        """True if the client gets nothing from the event that belongs to single tokens."""
        if self._generate is not None:
            return self._generate.whole is not False
        return chunk.is_plain and (chunk.ids is None or self._hides_ids)

    def _is_empty(self, chunk: Chunk) -> bool:
        """True for an event that engines send only for its ids, if the client gets no ids."""
        return not chunk.says and chunk.is_plain and chunk.ids is not None and self._hides_ids

    def _record(self, chunk: Chunk) -> None:
        if not chunk.has_choice:
            self._has_usage = self._has_usage or chunk.usage is not None
            self._finished = self._finished or self._form is not None
            return
        self._finished = self._finished or chunk.finish is not None
        if self.why is not None or chunk.opens or (self.parsed is not None and self.parsed.has_call):
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
            self.give_up(Why.LONG)

    def _shown(self, raw: bytes, chunk: Chunk) -> bytes:
        """The event without the fields that only the router requested, and with the usage of the whole answer."""
        if self._hides_ids:
            raw = edits.without_token_ids(raw)
        if chunk.usage is None:
            return raw
        if chunk.has_choice and not self._shows_usage:
            return edits.without_usage(raw)
        return edits.with_usage(raw, self.usage.sum) if self._resumed else raw

    def read(self, answer: Any) -> bytes:
        """The bytes that the client gets for what a parser has read; see `ParsedAnswer.read`. Raises CannotContinue."""
        assert self.parsed is not None
        part = self.parsed.read(answer)
        choice = {"index": self._index, "delta": part.delta, "logprobs": None, "finish_reason": part.finish}
        choice |= {} if part.finish is None else {"stop_reason": part.stop}
        choice |= {} if self._hides_ids else {"token_ids": part.ids}
        out = b""
        if part.delta or part.finish is not None or not self._hides_ids:
            head = {name: json.loads(value) for name, value in self.identity.items()}
            usage = {"usage": self.usage.sum(self._last_usage)} if self._shows_usage else {}
            said = json.dumps({**head, "choices": [choice], **usage}, separators=(",", ":"))
            out = b"data: " + said.encode() + b"\n\n"
            self.events += 1
        self._finished = part.finish is not None
        waiting, self._waiting = self._waiting, []
        return out + b"".join(self._take(*one) for one in waiting)

    # ------------------------------------------------------------ the rest

    @property
    def missing_end(self) -> bytes | None:
        """The final event, if the client lacks nothing else; empty if it has that too. None if it lacks more."""
        if self.ended:
            return b""
        counts = self._has_usage or not self.builder.text.wants_usage or self._generate is not None
        complete = self._finished and counts
        if complete and self.why in (None, Why.REASONING, Why.TOOL_CALL):
            return DONE if self._form is None else self._form.end
        return None

    def rest(self, most_parts: int | None = None) -> Rest:
        """What the client lacks, once its engine is gone. `most_parts`: see `RestBuilder.find`. Raises CannotContinue."""
        if self.why is not None:
            raise CannotContinue(self.why)
        return self.builder.find(finished=self._finished, most_parts=most_parts)

    def resume(self, rest: Rest, tokens: int) -> None:
        """Continue with another engine's answer, to which all later events belong. `tokens`: the number of tokens in the
        answer so far."""
        self._resumed, self._speaks = True, False
        self._needs_parser = self.parsed if rest.parsed else None
        self.usage.before = tokens
        self._waiting = []
        self._least_prompt_tokens = 0
        self.begin_again()
        if self.parsed is not None:
            if rest.parsed:
                self.parsed.resume()
                return
            self.parsed.begin(tokens)
        sent = self._sent
        sent.repeat_from(rest.parts)
        self._base_letters = sent.letters
        self._by_ids = rest.by_ids
        self._thoughts.resume(rest.markers, inside=rest.inside, fresh=rest.parts == 0)
        if self._form is not None and rest.markers is not None:  # engines report these only at the end
            self.usage.apart, self.usage.details = rest.apart, {"reasoning_tokens": rest.thought}
        self._misfit = Why.TEMPLATE if rest.is_known else Why.TOKENS
        exact = self._chat and not rest.by_ids and rest.lag == 0 and self.usage.prompt_tokens is not None
        self._least_prompt_tokens = (self.usage.prompt_tokens or 0) + tokens if exact else 0
        if self._generate is not None:
            self._generate.resume(sent.ids, sent.text_of(rest.parts))

    def give_up(self, why: Why) -> None:
        """Record why the answer can't be continued, and forget the answer."""
        self.why = self.why or why
        self._sent.clear()


def _form_of(api: Api) -> EventForm | None:
    match api:
        case Api.MESSAGES:
            return MessageEvents()
        case Api.RESPONSES:
            return ResponseEvents()
    return None
