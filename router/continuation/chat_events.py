"""Chats that continue as completions from token ids, so that no chat template can change the text."""

from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chunk import Chunk


class ChatEvents:
    """Writes the rest of a chat in the form of the chat's last event with text."""

    def __init__(self) -> None:
        self._part = self._thought = b""
        self._thinks_in: tuple[str, ...] = ()

    @property
    def can_write(self) -> bool:
        """True once an event with text or reasoning has been read."""
        return bool(self._part or self._thought)

    def learn(self, raw: bytes, chunk: Chunk) -> None:
        """Read an event of the first engine."""
        if chunk.finish is not None:
            return
        if chunk.reasoning:
            self._thought, self._thinks_in = raw, chunk.thinks_in
        elif chunk.text:
            self._part = raw

    def part(self, raw: bytes, chunk: Chunk, reasoning: str, text: str) -> bytes:
        """Convert a completion's event to the chat's form, with the given reasoning and text."""
        if self._part and not reasoning:
            event = edits.with_text(self._part, text)
        else:
            said = dict.fromkeys(self._thinks_in, reasoning) if reasoning else {}
            event = edits.with_delta(self._thought, said | ({"content": text} if text else {}))
        event = edits.with_finish_of(event, raw)
        event = event if chunk.ids is None else edits.with_ids(event, chunk.ids)
        return event if chunk.usage is None else edits.with_usage(event, lambda _: chunk.usage or {})
