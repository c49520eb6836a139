"""Reads usage and times from an answer while it passes."""

import json

from kvatlas_router.answers.engine_errors import UNKNOWN_STATUS, EngineError
from kvatlas_router.answers.event_parser import header_value, is_event_stream
from kvatlas_router.answers.event_stream import EventStream
from kvatlas_router.engine_objects.object_use import ObjectUse
from kvatlas_router.gateway.picker import Renaming
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.proxy.reported_usage import timings_of, usage_of_body, usage_of_one_answer
from kvatlas_router.tokens.text_request import TextRequest
from router_client.learning.timings import AnswerClock, Timings
from router_client.learning.token_counts import Usage

MOST_BYTES = 4 << 20
"""Limit in bytes. A longer answer that is not streamed is passed on unread."""


class AnswerReader:
    """Passes bytes through unchanged, except that it applies `renaming` and drops a stream's usage if the client did not ask
    for it.

    `renaming`: JSON answers and event streams name the client's model instead of the engine's. A JSON answer is then held back
    until it is complete.

    `clock`: started along with the reader, when the request goes to its engine. Compressed answers and those with a status
    other than 200 are not read. `is_stream`: the answer is a stream of server-sent events. `has_content`: an event with
    content arrived or, for an answer that is not read as a stream, its first bytes. `error`: the error in a complete answer
    with status 200, or its missing end. `kept`: ids of the `objects` that the answer creates.
    """

    def __init__(
        self,
        text: TextRequest | None,
        *,
        hides_usage: bool,
        renaming: Renaming | None = None,
        objects: ObjectUse | None = None,
        clock: AnswerClock | None = None,
    ) -> None:
        self.is_stream = False
        self.has_content = False
        self.error: EngineError | None = None
        self.kept: tuple[str, ...] = ()
        self._text = text
        self._hides_usage = hides_usage
        self._names = () if renaming is None else _spellings(renaming)
        self._objects = objects
        self._clock = clock or AnswerClock()
        self._stream: EventStream | None = None
        self._whole: bytearray | None = None
        self._usage: Usage | None = None

    def begin(self, status: int, headers: RawHeaders) -> None:
        """Take the answer's status and headers."""
        self.is_stream = is_event_stream(headers)
        if status != 200 or header_value(headers, b"content-encoding") not in (b"", b"identity"):
            return
        if self.is_stream:
            choices = 1 if self._text is None else self._text.all_choices
            self._stream = EventStream(hide_usage=self._hides_usage, whole=bool(self._names), choices=choices)
        elif b"json" in header_value(headers, b"content-type") and (
            self._text is not None or self._names or self._objects is not None
        ):
            self._whole = bytearray()

    @property
    def is_done(self) -> bool:
        """True if a stream's final event arrived. Clients disconnect as soon as they have it."""
        return self._stream is not None and self._stream.done

    @property
    def changes_length(self) -> bool:
        """True if the answer's length may differ from the one that the engine announced."""
        return bool(self._names) and self._whole is not None

    def feed(self, part: bytes, *, last: bool) -> bytes:
        """The bytes to send to the client now; may be empty."""
        if self._stream is not None:
            before = self._stream.parts
            passed = self._stream.feed(part)
            self._clock.part(self._stream.parts - before)
            self.has_content = self._stream.begun
            return self._rename(passed + self._stream.end() if last else passed)
        if part and not self.has_content:  # the times of single tokens are unknown
            self._clock.part()
            self.has_content = True
        if self._whole is not None:
            self._whole += part
            if len(self._whole) > MOST_BYTES:
                held = bytes(self._whole)
                self._whole = None
                return held if self._names else part
            if self._names:
                return self._rename(bytes(self._whole)) if last else b""
        return part

    def end(self) -> None:
        """Record that the answer is complete."""
        if self._stream is not None:
            self._usage, self.error = self._stream.usage, self._stream.error
            if self._text is not None and self.error is None and not self._stream.finished:
                self.error = EngineError(UNKNOWN_STATUS, "the stream ended before the answer was complete", b"")
            if self._objects is not None and self._objects.kept and self._stream.response_id is not None:
                self.kept = (self._stream.response_id,)
        elif self._whole is not None:
            whole = bytes(self._whole)
            if self._objects is None or self._text is not None:
                self._usage, self.error = usage_of_body(whole), EngineError.of_body(whole)
            if self._objects is not None:
                self.kept = self._objects.made_by(whole)
        if self._text is not None:
            self._usage = usage_of_one_answer(self._text, self._usage)

    def _rename(self, passed: bytes) -> bytes:
        for engines, clients in self._names:
            passed = passed.replace(engines, clients)
        return passed

    @property
    def usage(self) -> Usage | None:
        """The engine's usage for one prompt; None: there is nothing to compare with."""
        return self._usage

    @property
    def timings(self) -> Timings | None:
        return None if self._text is None else timings_of(self._text, self._clock, self._usage)


def _spellings(renaming: Renaming) -> tuple[tuple[bytes, bytes], ...]:
    """The member `model` as engines write it, and as the client gets it. Inside generated text its quotes would be escaped."""
    target, model = json.dumps(renaming.target).encode(), json.dumps(renaming.model).encode()
    return tuple((b'"model":' + space + target, b'"model":' + space + model) for space in (b"", b" "))
