"""Parses server-sent events (HTML Living Standard, 9.2.6) from a stream that arrives in pieces.

Pure and incremental: each byte is scanned once, so the time is linear, however long the events and pieces are.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MOST_DATA_BYTES = 256 << 10
"""Limit on the data that is kept for one event. The events that matter to a router are short."""

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_JSON_TYPE = re.compile(rb"(?:application|text)/(?:[\w.-]+\+)?json")
_FIELDS = (b"data", b"event", b"id", b"retry", b":")


@dataclass(frozen=True, slots=True)
class Event:
    """`type`: its `event` field; '' if there is none. `data`: its joined data lines; None if there are none, in which
    case clients ignore the event. `cut`: the data is longer than MOST_DATA_BYTES, and only its beginning is kept.
    `end`: where the event ends in the piece that completed it."""

    type: str
    data: bytes | None
    cut: bool
    end: int


class EventParser:
    """Takes pieces, returns complete events, including those without data, such as comments."""

    def __init__(self) -> None:
        self.ended_in_cr = False
        """If a line feed comes next, it belongs to the previous line's end."""
        self._line: list[bytes] = []
        self._kept = 0
        self._cut = False
        self._data: list[bytes] | None = None
        self._type = b""
        self._begun = False
        self._line_begun = False
        self._first_line = True

    @property
    def in_event(self) -> bool:
        """True if an event has begun but not ended."""
        return self._begun or self._line_begun

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes."""
        events: list[Event] = []
        at = 1 if self.ended_in_cr and piece.startswith(b"\n") else 0
        if piece:
            self.ended_in_cr = False
        for found in _LINE_END.finditer(piece, at):
            self._keep(piece[at : found.start()])
            at = found.end()
            if (event := self._end_line(at)) is not None:
                events.append(event)
        if at < len(piece):
            self._keep(piece[at:])
        elif at and piece.endswith(b"\r"):
            self.ended_in_cr = True
        return events

    def end(self) -> Event | None:
        """The last event, if the stream ends without the blank line after it.

        The standard drops such an event; real clients read it.
        """
        if self._line_begun:
            self._end_line(0)
        return self._dispatch(0) if self._begun else None

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        self._line_begun = True
        room = MOST_DATA_BYTES - self._kept
        if len(part) > room:
            part, self._cut = part[:room], True
        self._kept += len(part)
        if part:
            self._line.append(part)

    def _end_line(self, at: int) -> Event | None:
        line = self._line[0] if len(self._line) == 1 else b"".join(self._line)
        self._line.clear()
        empty, self._line_begun = not self._line_begun, False
        if self._first_line:
            self._first_line = False
            empty = empty or line == _BOM
            line = line.removeprefix(_BOM)
        if empty:
            return self._dispatch(at)
        self._begun = True
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            if self._data is None:
                self._data = []
            self._data.append(value)
        elif name == b"event":
            self._type = value
        return None

    def _dispatch(self, at: int) -> Event:
        data = None if self._data is None else b"\n".join(self._data)
        event = Event(self._type.decode("utf-8", "replace"), data, self._cut, at)
        self._data, self._type, self._begun, self._kept, self._cut = None, b"", False, 0, False
        return event


def may_begin_event(text: bytes) -> bool:
    """True if an event may begin with this text."""
    head = text[: len(_BOM) + 16].removeprefix(_BOM).lstrip(b"\r\n")
    return any(head.startswith(field) or field.startswith(head) for field in _FIELDS)


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the answer with these headers is a stream of server-sent events."""
    return header_value(headers, b"content-type").startswith(b"text/event-stream")


def can_be_read(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the answer is an uncompressed event stream."""
    return is_event_stream(headers) and header_value(headers, b"content-encoding") in (b"", b"identity")


def is_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the answer with these headers is one JSON text, not a stream of several."""
    return _JSON_TYPE.fullmatch(header_value(headers, b"content-type").partition(b";")[0].rstrip()) is not None


def header_value(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The header's first value, in lower case; empty if absent."""
    for each, value in headers:
        if each.lower() == name:
            return value.strip().lower()
    return b""
