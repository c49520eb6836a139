"""Reads the events of an engine's answer that another engine may continue."""

from abc import ABC, abstractmethod

from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_parser import MOST_DATA_BYTES, Event, EventParser
from kvatlas_router.continuation.reasons import Why

MOST_WITHHELD_BYTES = 1 << 16
_ERROR_MARKS = (b'"error"', b'"abort"', b'"response.failed"')
"""An event without a type contains one of these if it is an error."""
_BLANK = (b"\n\n", b"\r\r", b"\r\n\r\n")


class JoinedEvents(ABC):
    """`error`: the engine's error, which ends its answer; `withheld`: the events that carry it, which the client did
    not get. `events`: the number of events with data that the client did get."""

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self.withheld = b""
        self.events = 0
        self._parser = EventParser()

    def feed(self, passed: bytes) -> bytes:
        """The bytes that the client gets for these whole events. Raises CannotContinue if the events don't follow what
        the client has."""
        if not self._parser.in_event and not self._parser.ended_in_cr and _is_plain(passed):
            return self._pass(Event("", passed[6:-2], False, len(passed)), passed)
        out: list[bytes] = []
        at = 0
        for event in self._parser.feed(passed):
            out.append(self._pass(event, passed[at : event.end]))
            at = event.end
        if at < len(passed):
            self.give_up(Why.LONG)  # only an event that has not ended passes in parts
            out.append(passed[at:])
        return b"".join(out)

    def end(self, rest: bytes) -> bytes:
        """Like `feed`, for the end of an engine's stream, whose last event may lack its blank line."""
        if rest and not rest.endswith(_BLANK):
            rest += b"\n" if rest.endswith((b"\n", b"\r")) else b"\n\n"
        return self.feed(rest)

    def begin_again(self) -> None:
        """From now on, read the events of another engine."""
        self.error, self.withheld = None, b""
        self._parser = EventParser()

    @abstractmethod
    def give_up(self, why: Why) -> None:
        """Record why the answer can't be continued."""

    @abstractmethod
    def _take(self, event: Event, data: bytes, raw: bytes) -> bytes:
        """The bytes that the client gets for an event that is not an error; `data`: its data."""

    def _pass(self, event: Event, raw: bytes) -> bytes:
        if event.data is None:
            return raw
        if self.error is None and not event.cut and (event.type or any(mark in event.data for mark in _ERROR_MARKS)):
            self.error = EngineError.of_event(event.type, event.data)
        if self.error is not None:
            if len(self.withheld) < MOST_WITHHELD_BYTES:
                self.withheld += raw
            return b""
        raw = self._take(event, event.data, raw)
        self.events += bool(raw)
        return raw


def _is_plain(passed: bytes) -> bool:
    """True if these bytes are one event with nothing but a JSON text, as they almost always are. A parser takes several
    times as long."""
    if not (passed.startswith(b"data: {") and passed.endswith(b"}\n\n")):
        return False
    return passed.count(b"\n") == 2 and b"\r" not in passed and len(passed) < MOST_DATA_BYTES
