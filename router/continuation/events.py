"""Streams of named events. The rest of such an answer is requested as a chat or a completion, and written as events of the
same form."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation.chunk import Chunk


class EventForm(Protocol):
    """The events of one API. `end`: the event that follows the usage."""

    end: bytes

    def read(self, event: Event, raw: bytes) -> Chunk | None:
        """Read an event of the first engine. None if it contains no part of the answer."""

    def is_end(self, event: Event) -> bool:
        """True if the event is the last one."""

    def finish(self, chunk: Chunk) -> None:
        """Read how the rest ended."""

    def part(self, reasoning: str, text: str, *, last: bool) -> bytes:
        """The events for this reasoning and text. `last`: also the events that end the item."""

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The event with the finish reason and the usage."""


def read_object(event: Event) -> dict[str, Any]:
    """An event's data; empty if it can't be read."""
    try:
        data = decode(event.data or b"")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def named_event(data: Mapping[str, Any]) -> bytes:
    """An event that is named after its type."""
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
