"""Reads a passing stream of server-sent events: its content, usage, error and end."""

import re
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import Event, EventParser, may_begin_event
from kvatlas_router.engine_objects.object_use import response_id
from router_client.learning.token_counts import Usage

MOST_HELD_BYTES = 16 << 10
"""Limit on the held bytes of an incomplete event. A longer event contains more than a usage."""
MOST_WHOLE_BYTES = 4 << 20
"""Size of the longest event that is passed on whole."""
MOST_PREAMBLE_BYTES = 256 << 10
"""Limit on the bytes of events held before the first content. They may include a chat's prompt, as token ids."""
HEAD_BYTES = 4 << 10
"""An event's content, if any, begins within this many bytes of its data."""

_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|refusal|arguments|delta|thinking|partial_json)"\s*:\s*"(?!")'
    rb'|"(?:tool_calls|token_ids|output_ids)"\s*:\s*\[\s*[^\]\s]'
)
"""Matches the events of vLLM 0.33 and SGLang 0.5 that carry tokens. Decoding the JSON of every token would take
longer."""
_QUOTE = ord('"')
_PREAMBLE = (
    "message_start|content_block_start|response.(created|queued|in_progress|output_item.added|content_part.added)"
)
"""Events of Anthropic's Messages and OpenAI's Responses APIs that come before any token."""
_LAST = "done|message_stop|response.(completed|incomplete|failed|cancelled)"
_CHOICES = re.compile(rb'"choices"\s*:')
_A_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*[^\]\s]')
_SAYS_NOTHING = frozenset({"index", "role", "delta"})
"""Members that a choice has before its first token."""
_FINISH = rb'"finish_reason"\s*:\s*["{]'
_FINISHES = re.compile(_FINISH)
"""Matches the end of a choice."""
_PING = re.compile(rb'\s*\{\s*"type"\s*:\s*"ping"\s*\}\s*')
_NULL = (b'"usage":null', b'"usage": null')
_MARKS = re.compile(rb'"(?:type|error|abort)"|\r|' + _FINISH)
"""Names and values that mark events that are more than a part of an answer: every error, final event, ping and end of a
choice contains one of them. A carriage return is included because it can end a line too."""
_CHAT_TEXT = b'"content":"'
"""Finds what `_CONTENT` finds in almost all events, in a third of the time."""


def _type_patterns(types: str) -> tuple[re.Pattern[str], re.Pattern[bytes]]:
    """Patterns for an event's `event` field, and for the member `type` of its data, which may be the first or the last
    member."""
    escaped = types.replace(".", r"\.")
    return re.compile(escaped), re.compile(rb'"type"\s*:\s*"(?:' + escaped.encode() + rb')"')


_PREAMBLE_TYPE, _PREAMBLE_MEMBER = _type_patterns(_PREAMBLE)
_LAST_TYPE, _LAST_MEMBER = _type_patterns(_LAST)


class EventStream:
    """Passes bytes through unchanged and immediately, with two exceptions.

    `hold`: events are held back until the answer has `begun`, so that another engine can still be tried. Comments and pings
    pass, since they carry nothing. `hide_usage`: the event with a usage but no choice is dropped, so the beginning of an event
    is held until it can't belong to that event.

    `error`: the error that the stream reports, instead of an answer or after a part of it. `response_id`: the id, in OpenAI's
    Responses API. `usage`: the last one seen. `parts`: number of events with a part of the answer, not only a role, a finish
    reason or a usage. `events`: number of events with data. `done`: the final event arrived. `in_event`: the beginning of an
    event was passed on, but not yet its end.
    """

    def __init__(
        self,
        *,
        hide_usage: bool,
        hold: bool = False,
        whole: bool = False,
        most_whole: int = MOST_WHOLE_BYTES,
        counts: bool = False,
        choices: int = 1,
        ends_at_error: bool = False,
    ) -> None:
        """`whole`: pass on only whole events, up to `most_whole` bytes. `counts`: each event may carry the usage so far, and
        an event without a choice the final usage. `choices`: how many choices the request asks for, over all its prompts.
        `ends_at_error`: once an answer has begun, nothing that follows an error is passed on."""
        self._counts = counts
        self._choices = choices
        self._ends_at_error = ends_at_error
        self.usage: Usage | None = None
        self.error: EngineError | None = None
        self.response_id: str | None = None
        self.parts = 0
        self.events = 0
        self.done = False
        self.begun = False
        self.in_event = False
        self._hide = hide_usage
        self._hold = hold
        self._whole = whole
        self._most_whole = most_whole
        self._parser = EventParser()
        self._out: list[bytes] = []
        self._before: list[bytes] = []
        self._before_bytes = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._ended: set[object] = set()
        """The indices of the choices that have ended."""
        self._has_last_usage = False
        self._last: list[bytes] | None = None
        """The list to which the last event was added; None: it was dropped."""

    def feed(self, piece: bytes) -> bytes:
        """The bytes to send to the client now; may be empty."""
        if self.events and self.begun and self.error is None and self._passes_plainly(piece):
            return piece
        if self._is_cut_off:
            return b""
        at = 0
        if self._parser.ended_in_cr and not self._parser.in_event and piece.startswith(b"\n"):
            at = 1
            if self._last is not None:
                self._last.append(b"\n")
        for event in self._parser.feed(piece):
            self._pending.append(piece[at : event.end])
            at = event.end
            self._end_event(event)
            if self._is_cut_off:
                return self._take()
        if at < len(piece):
            self._pending.append(piece[at:])
            self._pending_bytes += len(piece) - at
            if self._may_pass():
                self.in_event = True
                self._give_out()
        return self._take()

    def _passes_plainly(self, piece: bytes) -> bool:
        """Return true, and count the piece, if it is one whole event with nothing but a part of an answer, as almost all pieces
        are. `_read` would come to the same result, but would take several times as long."""
        if (
            not (piece.startswith(b"data: {") and piece.endswith(b"}\n\n"))
            or len(piece) > HEAD_BYTES
            or piece.count(b"\n") != 2
            or _MARKS.search(piece) is not None
            or (b'"usage"' in piece and not self._may_count(piece))
            or self._parser.in_event
            or self._parser.ended_in_cr
            or self._pending
        ):
            return False
        self.events += 1
        text_at = piece.find(_CHAT_TEXT) + len(_CHAT_TEXT)
        has_text = text_at >= len(_CHAT_TEXT) and piece[text_at] != _QUOTE
        self.parts += has_text or _CONTENT.search(piece) is not None
        self._last = self._out
        return True

    def _may_count(self, piece: bytes) -> bool:
        """True if the usage says nothing that a later usage does not say."""
        return any(null in piece for null in _NULL) or (self._counts and _A_CHOICE.search(piece) is not None)

    def end(self) -> bytes:
        """The remaining bytes at the end of the stream: held events, and a final event that lacks its blank line."""
        if self._is_cut_off:
            return b""
        if (event := self._parser.end()) is not None:
            self._end_event(event)
        if self._hold and self.error is not None and not self.begun:
            return b""
        self.begun = self.begun or self.events > 0
        self._out += [*self._before, *self._pending]
        self._before.clear()
        self._pending.clear()
        return self._take()

    @property
    def is_over(self) -> bool:
        """True if nothing that matters follows: the final event or an error arrived."""
        return self.done or self.error is not None

    @property
    def finished(self) -> bool:
        """True if the answer is complete: its final event has arrived or, since not every server sends one, its last usage
        or the end of every choice."""
        return self.done or self._has_last_usage or len(self._ended) >= self._choices

    @property
    def _is_cut_off(self) -> bool:
        return self._ends_at_error and self.error is not None and self.begun

    def _take(self) -> bytes:
        taken = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        return taken

    @property
    def _holds(self) -> bool:
        return self._hold and not self.begun

    def _end_event(self, event: Event) -> None:
        left_out = self._read(event)
        self.in_event = False
        if left_out:
            self._pending.clear()
            self._last = None
        elif self._holds and event.data is not None and not _PING.fullmatch(event.data):
            self._before += self._pending
            self._before_bytes += sum(map(len, self._pending))
            self._pending.clear()
            self._last = self._before
            if self.error is None and self._before_bytes > MOST_PREAMBLE_BYTES:
                self.begun = True
                self._give_out()
        else:
            self._give_out()
        self._pending_bytes = 0

    def _give_out(self) -> None:
        if not self._holds:
            self._out += self._before
            self._before.clear()
        self._out += self._pending
        self._pending.clear()
        self._last = self._out

    def _may_pass(self) -> bool:
        """True if the beginning of the event may be passed on before its end has arrived."""
        if self.in_event:
            return True
        if self._whole:
            return self._pending_bytes > self._most_whole
        if not self._hide and not self._hold:
            self.begun = self.begun or not may_begin_event(self._pending[0])
            return True
        text = b"".join(self._pending)
        self._pending[:] = [text]
        if len(text) > MOST_HELD_BYTES or not may_begin_event(text):
            self.begun = True
            return True
        if self._hide and not _A_CHOICE.search(text):
            return False
        self.begun = self.begun or _is_content("", text)
        return not self._holds

    def _read(self, event: Event) -> bool:
        """Read an event. Returns True if it must be dropped."""
        data = event.data
        if data is None or _PING.fullmatch(data):
            return False
        self.events += 1
        if data[:16].strip(b' "[]').upper() == b"DONE":
            self.done = True
            self.begun = self.begun or self.error is None
            return False
        if self.error is not None and not self.begun:
            return False  # an error came first: whatever follows is no answer
        if self.error is None and not (event.cut or self.done):
            self.error = EngineError.of_event(event.type, data)
            if self.error is not None:
                return False
        if _FINISHES.search(data[-HEAD_BYTES:]) is not None:
            self._ended |= {0} if self._choices == 1 else _ended_choices(data)
        head = data[:HEAD_BYTES]
        if _is_of(_LAST_TYPE, _LAST_MEMBER, event.type, data):  # it may repeat the whole answer
            self.done = self.begun = True
        elif _is_content(event.type, head):
            self.parts += 1
            self.begun = True
        elif _is_of(_PREAMBLE_TYPE, _PREAMBLE_MEMBER, event.type, data):
            self.response_id = self.response_id or response_id(data)
        elif not self.begun:
            self.begun = not _CHOICES.search(head) or _says_something(data)
        if event.cut or b'"usage"' not in data or any(null in data for null in _NULL):
            return False
        answer = _decode(data)
        if (usage := Usage.of(answer)) is not None:
            self.usage = usage
            if answer.get("choices") == []:
                self._has_last_usage = True
            return self._hide and not answer.get("choices")
        return False


def _is_content(type: str, text: bytes) -> bool:
    return _CONTENT.search(text) is not None and not _is_of(_PREAMBLE_TYPE, _PREAMBLE_MEMBER, type, text)


def _says_something(data: bytes) -> bool:
    """True if a choice has more than a role. Any field counts, since engines and models add their own."""
    answer = _decode(data)
    if not isinstance(answer, dict) or not isinstance(choices := answer.get("choices") or [], list):
        return True  # don't hold back what can't be read
    for choice in choices:
        if not isinstance(choice, dict):
            return True
        delta = choice.get("delta")
        said = {**choice, **(delta if isinstance(delta, dict) else {})}
        if any(value for name, value in said.items() if name not in _SAYS_NOTHING):
            return True
    return False


def _ended_choices(data: bytes) -> set[object]:
    """The indices of the choices that end in this event. Each event of SGLang's `/generate` is about one choice."""
    answer = _decode(data)
    if not isinstance(answer, dict):
        return set()
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return {answer.get("index")}
    ended = (one for one in choices if isinstance(one, dict) and one.get("finish_reason") is not None)
    return {one.get("index") for one in ended}


def _is_of(types: re.Pattern[str], member: re.Pattern[bytes], type: str, data: bytes) -> bool:
    """True if the event has one of these types."""
    if type and type != "message":
        return types.fullmatch(type) is not None
    return member.search(data, 0, 256) is not None or member.search(data, max(0, len(data) - 64)) is not None


def _decode(data: bytes) -> Any:
    try:
        return decode(data)
    except ValueError:  # passes unchanged, for the client to judge
        return None
