"""Streams of OpenAI's Responses API. Here, too, the rest of an answer is requested as a chat. Events are numbered and
belong to items and parts; the last one contains the whole response.

The forms are those of vLLM 0.33 and SGLang 0.5.23, which list an event's fields in alphabetical order.
"""

from collections.abc import Mapping
from typing import Any

from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation.chunk import Chunk
from kvatlas_router.continuation.events import named_event, read_object
from kvatlas_router.continuation.reasons import Why

_DELTAS = {"response.output_text.delta": "message", "response.reasoning_text.delta": "reasoning"}
_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}
_SILENT = ("response.in_progress", "response.queued")
_PART = "response.content_part.added"
_DONE = ("response.output_text.done", "response.reasoning_text.done", "response.content_part.done")
"""Events that precede the one that ends an item: one for its text, one for its part."""
_ENDS = ("response.completed", "response.incomplete")


class ResponseEvents:
    """See `EventForm`. A reasoning item may precede the text item."""

    end = b""

    def __init__(self) -> None:
        self._created: dict[str, Any] = {}
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}
        self._parts: list[str] = []
        self._delta: dict[str, Any] = {}
        self._has_part, self._done = False, 0
        """Which of the item's other events the client has: the one that begins its part, and those that end it."""
        self._is_cut = self._is_ended = False

    def read(self, event: Event, raw: bytes) -> Chunk | None:
        """See `EventForm`."""
        data = read_object(event)
        kind = str(data.get("type"))
        self._number += 1
        self._is_ended = kind in _ENDS
        if kind == "response.created" and _has_id(data.get("response")):
            self._created = data
            return Chunk(opens=True)
        if data.get("sequence_number") != self._number or not self._created:
            return Chunk(other=Why.UNREADABLE)
        if self._is_ended:
            usage = data["response"].get("usage") if isinstance(data.get("response"), dict) else None
            return Chunk(usage=_counts(usage), has_choice=False)
        if kind == "response.output_item.added":
            return self._open(data.get("item"))
        if kind == "response.output_item.done" and isinstance(item := data.get("item"), dict):
            self._items.append(item)
            return None
        if kind in _DELTAS and isinstance(text := data.get("delta"), str) and not data.get("logprobs"):
            self._delta = data
            self._parts.append(text)
            return Chunk(text=text) if _DELTAS[kind] == "message" else Chunk(reasoning=text)
        self._has_part = self._has_part or kind == _PART
        self._done += kind in _DONE
        if kind == "response.output_text.done":
            return Chunk(finish="stop")
        return None if kind in (*_SILENT, *_DONE, _PART) else Chunk(other=Why.UNREADABLE)

    def _open(self, item: Any) -> Chunk | None:
        if not _has_id(item) or item.get("type") not in _NAMES:
            is_call = isinstance(item, dict) and str(item.get("type")).endswith("_call")
            return Chunk(opens=True, other=Why.TOOL_CALL if is_call else Why.UNREADABLE)
        self._begin(item)
        return Chunk(
            opens=True, other=Why.UNREADABLE if any(one.get("type") == "message" for one in self._items) else None
        )

    def is_end(self, event: Event) -> bool:
        """See `EventForm`."""
        return self._is_ended

    def finish(self, chunk: Chunk) -> None:
        """See `EventForm`."""
        self._is_cut = self._is_cut or chunk.finish == "length"

    def part(self, reasoning: str, text: str, *, last: bool) -> bytes:
        """See `EventForm`."""
        said = [self._say(kind, part) for kind, part in (("reasoning", reasoning), ("message", text)) if part]
        return b"".join([*said, self._close("incomplete" if self._is_cut else "completed") if last else b""])

    def _say(self, kind: str, text: str) -> bytes:
        opening = b""
        if self._is_closed or self._item["type"] != kind:
            opening = self._close("completed") + self._add(kind)
        if not self._has_part:
            self._has_part = True
            opening += self._event({**self._place, "part": self._part(""), "type": _PART})
        self._parts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        said = {**self._place, "delta": text, "type": f"response.{_NAMES[kind]}.delta", **logprobs}
        return opening + self._event(
            {**said, **{name: value for name, value in self._delta.items() if name not in said}}
        )

    def _add(self, kind: str) -> bytes:
        """The event that begins an item."""
        id = str(self._created["response"]["id"]).replace("resp_", "msg_" if kind == "message" else "rs_", 1)
        content: dict[str, Any] = {"content": [], "role": "assistant"} if kind == "message" else {"summary": []}
        self._begin({"id": id, **content, "status": "in_progress", "type": kind})
        return self._event({"item": self._item, "output_index": len(self._items), "type": "response.output_item.added"})

    def _begin(self, item: dict[str, Any]) -> None:
        self._item, self._parts, self._delta, self._has_part, self._done = item, [], {}, False, 0

    def _close(self, status: str) -> bytes:
        """The events that end the item, if it has not ended."""
        if self._is_closed:
            return b""
        text = "".join(self._parts)
        name, part, place = _NAMES[self._item["type"]], self._part(text), self._place
        logprobs: dict[str, Any] = {"logprobs": []} if self._item["type"] == "message" else {}
        done = {**place, "text": text, "type": f"response.{name}.done", **logprobs}
        item = {**self._item, "content": [part], "status": status}
        self._items.append(item)
        ended = {"item": item, "output_index": place["output_index"], "type": "response.output_item.done"}
        events = (done, {**place, "part": part, "type": "response.content_part.done"}, ended)
        return b"".join(map(self._event, events[self._done :]))

    @property
    def _is_closed(self) -> bool:
        return not self._item or any(item.get("id") == self._item["id"] for item in self._items)

    @property
    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item["id"], "output_index": len(self._items)}

    def _part(self, text: str) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"text": text, "type": "reasoning_text"}
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """See `EventForm`."""
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought or 0},
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
        }
        kind = "incomplete" if self._is_cut else "completed"
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if self._is_cut else {}
        whole = {**self._created["response"], "status": kind, "output": self._items, "usage": counted, **cut}
        self._number += 1
        return named_event(
            {**self._created, "type": f"response.{kind}", "response": whole, "sequence_number": self._number}
        )

    def _event(self, data: Mapping[str, Any]) -> bytes:
        self._number += 1
        return named_event(dict(sorted({**data, "sequence_number": self._number}.items())))


def _has_id(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("id"), str)


def _counts(usage: Any) -> Mapping[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    details, thought = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": details,
        "completion_tokens_details": thought,
    }
