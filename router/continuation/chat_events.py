"""Streams of chats that go on as completions of token ids, so that no template is between an answer and its continuation."""

from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chunk import Chunk


class ChatEvents:
    """Writes the rest of a chat in the form of its last event with text."""

    def __init__(self) -> None:
        self._part = b""

    @property
    def can_write(self) -> bool:
        """True once it knows the form."""
        return bool(self._part)

    def learn(self, raw: bytes, chunk: Chunk) -> None:
        """Read an event of the first engine."""
        if chunk.text and chunk.finish is None:
            self._part = raw

    def part(self, raw: bytes, chunk: Chunk, text: str) -> bytes:
        """The event for a completion's, with this part of its text."""
        event = edits.with_finish_of(edits.with_text(self._part, text), raw)
        event = event if chunk.ids is None else edits.with_ids(event, chunk.ids)
        return event if chunk.usage is None else edits.with_usage(event, lambda _: chunk.usage or {})
