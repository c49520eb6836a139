"""Streams of Anthropic's Messages API. Neither vLLM 0.33 nor SGLang 0.5.23 accepts a partial last message there, but both
convert each request to a chat, and chats can be continued. So the rest is requested as that chat, and the chat's events are
converted to those of a message."""

from collections.abc import Mapping
from typing import Any

from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chunk import Chunk
from kvatlas_router.continuation.events import named_event, read_object
from kvatlas_router.continuation.reasons import Why

END = named_event({"type": "message_stop"})
_EMPTY = {"thinking": {"type": "thinking", "thinking": ""}, "text": {"type": "text", "text": ""}}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessageEvents:
    """See `EventForm`. A thinking block may precede the text block."""

    end = END

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}
        self._block, self._index, self._is_open = "", -1, False
        self._usage: dict[str, Any] = {}
        self._reason: tuple[str | None, str | None] = None, None

    def read(self, event: Event, raw: bytes) -> Chunk | None:
        """See `EventForm`."""
        data = read_object(event)
        match data.get("type"):
            case "message_start":
                message = data.get("message")
                usage = message.get("usage") if isinstance(message, dict) else None
                self._usage = dict(usage) if isinstance(usage, dict) else {}
                return Chunk(opens=True, usage=_counts(usage))
            case "content_block_start":
                block = data.get("content_block")
                self._block = str(block.get("type")) if isinstance(block, dict) else ""
                self._index, self._is_open = self._index + 1, True
                known = self._block in _EMPTY
                return Chunk(opens=True, other=None if known else _OTHERS.get(self._block, Why.UNREADABLE))
            case "content_block_delta":
                return self._read_delta(data.get("delta"), raw)
            case "content_block_stop":
                self._is_open = False
                return Chunk(finish="stop") if self._block == "text" else None
            case "message_delta":
                return Chunk(usage=_counts(data.get("usage")), has_choice=False)
            case "message_stop" | "ping":
                return None
        return Chunk(other=Why.UNREADABLE)

    def _read_delta(self, delta: Any, raw: bytes) -> Chunk | None:
        found = delta.get(self._block) if isinstance(delta, dict) else None
        if isinstance(found, str):
            self._parts[self._block] = raw
            return Chunk(text=found) if self._block == "text" else Chunk(reasoning=found)
        is_signature = isinstance(delta, dict) and delta.get("type") == "signature_delta"
        return None if is_signature else Chunk(other=Why.UNREADABLE)

    def is_end(self, event: Event) -> bool:
        """See `EventForm`."""
        return event.type == "message_stop" or b'"message_stop"' in (event.data or b"")[:64]

    def finish(self, chunk: Chunk) -> None:
        """See `EventForm`."""
        if chunk.finish == "length":
            self._reason = "max_tokens", None
        elif chunk.finish is not None:
            self._reason = ("end_turn", None) if chunk.stop is None else ("stop_sequence", chunk.stop)

    def part(self, reasoning: str, text: str, *, last: bool) -> bytes:
        """See `EventForm`."""
        said = [self._say(block, part) for block, part in (("thinking", reasoning), ("text", text)) if part]
        return b"".join([*said, self._close() if last else b""])

    def _say(self, block: str, text: str) -> bytes:
        opening = b""
        if self._block != block or not self._is_open:
            opening = self._close()
            self._block, self._index, self._is_open = block, self._index + 1, True
            opening += named_event(
                {"type": "content_block_start", "index": self._index, "content_block": _EMPTY[block]}
            )
        if (part := self._parts.get(block)) is not None:
            return opening + edits.with_text(part, text)
        delta = {"type": _DELTAS[block], block: text}
        return opening + named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        is_open, self._is_open = self._is_open, False
        return named_event({"type": "content_block_stop", "index": self._index}) if is_open else b""

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """See `EventForm`."""
        reason, sequence = self._reason
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        counted = {**self._usage, "output_tokens": usage["completion_tokens"]}
        return named_event({"type": "message_delta", "delta": delta, "usage": counted})


_OTHERS = {"redacted_thinking": Why.REASONING, "tool_use": Why.TOOL_CALL}


def _counts(usage: Any) -> Mapping[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    parts = [usage.get(name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
    prompt = sum(part for part in parts if type(part) is int)
    return {"prompt_tokens": prompt, "completion_tokens": usage.get("output_tokens")}
