"""Streams of Anthropic's Messages API. Neither vLLM 0.33 nor SGLang 0.5.23 takes a partial last message there, but both make a
chat of each request, and chats go on: so the rest is asked for as that chat, and its events become those of a message."""

import json
from collections.abc import Mapping
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation import edits
from kvatlas_router.continuation.chunk import Chunk
from kvatlas_router.continuation.reasons import Why
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_router.tokens.text_request import TextRequest

END = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt")
_OTHERS = {"thinking": Why.REASONING, "redacted_thinking": Why.REASONING, "tool_use": Why.TOOL_CALL}


def chat_body(text: TextRequest) -> dict[str, Any]:
    """The chat of a request, which streams its usage. Raises CannotTokenize if a router can't know that chat."""
    body = text.body
    same = {name: body[name] for name in _SAME if body.get(name) is not None}
    stops = {"stop": body["stop_sequences"]} if body.get("stop_sequences") else {}
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {**as_chat(text).body, **same, **stops, "stream_options": options}


def read_message_event(event: Event) -> Chunk | None:
    """An event of an engine's message; None for its end, and for a ping."""
    try:
        data = decode(event.data or b"")
    except (ValueError, RecursionError):
        return Chunk(other=Why.UNREADABLE)
    if not isinstance(data, dict):
        return Chunk(other=Why.UNREADABLE)
    match data.get("type"):
        case "message_start":
            message = data.get("message")
            return Chunk(opens=True, usage=_usage(message if isinstance(message, dict) else {}))
        case "content_block_start":
            block = data.get("content_block")
            kind = block.get("type") if isinstance(block, dict) else None
            return Chunk(opens=True, other=None if kind == "text" else _OTHERS.get(str(kind), Why.UNREADABLE))
        case "content_block_delta":
            delta = data.get("delta")
            text = delta.get("text") if isinstance(delta, dict) else None
            return Chunk(text=text) if isinstance(text, str) else Chunk(other=Why.UNREADABLE)
        case "content_block_stop":
            return Chunk(finish="stop")
        case "message_delta":
            return Chunk(usage=_usage(data), has_choice=False)
        case "message_stop" | "ping":
            return None
    return Chunk(other=Why.UNREADABLE)


def is_end(event: Event) -> bool:
    """True for the last event of a message."""
    return event.type == "message_stop" or b'"message_stop"' in (event.data or b"")[:64]


def _usage(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    usage = data.get("usage")
    if not isinstance(usage, dict):
        return None
    parts = [usage.get(name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
    prompt = sum(part for part in parts if type(part) is int)
    return {"prompt_tokens": prompt, "completion_tokens": usage.get("output_tokens")}


class MessageEvents:
    """Writes the rest of a message in the form of its first events."""

    def __init__(self) -> None:
        self._part = b""
        self._usage: dict[str, Any] = {}
        self._reason: tuple[str | None, str | None] = None, None

    def learn(self, event: Event, raw: bytes, chunk: Chunk) -> None:
        """Read an event of the first engine."""
        if chunk.text:
            self._part = raw
        if chunk.opens and chunk.usage is not None:
            self._usage = dict(decode(event.data or b"")["message"]["usage"])

    def finish(self, chunk: Chunk) -> None:
        """Read how the chat ended."""
        if chunk.finish == "length":
            self._reason = "max_tokens", None
        elif chunk.finish is not None:
            self._reason = ("end_turn", None) if chunk.stop is None else ("stop_sequence", chunk.stop)

    def part(self, text: str, *, last: bool) -> bytes:
        """The events for a part of the text, and for its end."""
        event = edits.with_text(self._part, text) if text else b""
        return event + _event({"type": "content_block_stop", "index": 0}) if last else event

    def usage(self, completion_tokens: int) -> bytes:
        """The event with the reason and the usage."""
        reason, sequence = self._reason
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = {**self._usage, "output_tokens": completion_tokens}
        return _event({"type": "message_delta", "delta": delta, "usage": usage})


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
