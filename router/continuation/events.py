"""Streams of named events, whose rest is asked for as a chat or a completion: what is read from them, and written in their
form."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation.chunk import Chunk


class EventForm(Protocol):
    """One API's events. `end`: the event behind the usage."""

    end: bytes

    def read(self, event: Event, raw: bytes) -> Chunk | None:
        """Read an event of the first engine. None: it says nothing."""

    def is_end(self, event: Event) -> bool:
        """True for the last event."""

    def finish(self, chunk: Chunk) -> None:
        """Read how the rest ended."""

    def part(self, reasoning: str, text: str, *, last: bool) -> bytes:
        """The events for a part of both, and for its end."""

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The event with the reason and the usage."""


def read_object(event: Event) -> dict[str, Any]:
    """An event's data; empty if it can't be read."""
    try:
        data = decode(event.data or b"")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def named_event(data: Mapping[str, Any]) -> bytes:
    """An event with the name of its type."""
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
