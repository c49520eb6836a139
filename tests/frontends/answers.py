"""The content of an answer, whatever the API, in one piece or as events: ids, times and the boundaries of pieces are left
out."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TEXTS = (
    "content",
    "text",
    "reasoning",
    "reasoning_content",
    "thinking",
    "delta",
    "arguments",
    "partial_json",
    "message",
)
ENDS = ("finish_reason", "stop_reason", "status", "type", "object")


@dataclass(slots=True)
class Said:
    """`texts`: all text under each key, joined. `ends`: the values of fields that classify, without repeats. `last`: the last
    line of a stream."""

    status: int
    content_type: str
    texts: dict[str, str] = field(default_factory=dict)
    ends: dict[str, list[Any]] = field(default_factory=dict)
    last: str = ""


def said(answer: httpx.Response, *, cumulative: bool = False) -> Said:
    """`cumulative`: each event repeats the text before it, as SGLang's own API does."""
    kind = answer.headers.get("content-type", "")
    lines = [line for line in answer.text.splitlines() if line.startswith("data:")]
    texts, ends = defaultdict[str, str](str), defaultdict[str, list[Any]](list)
    for document in _documents(answer.text, lines):
        for key, value in _fields(document):
            if key in TEXTS and isinstance(value, str):
                texts[key] = value if cumulative else texts[key] + value
            elif key in ENDS and value is not None and value not in ends[key]:
                ends[key].append(value)
    last = lines[-1] if lines and lines[-1].endswith("[DONE]") else ""
    return Said(answer.status_code, kind, dict(texts), dict(ends), last)


def usage(answer: httpx.Response) -> tuple[int, int]:
    """(prompt tokens, cached ones) as the engine counted them."""
    found = [
        value
        for document in _documents(answer.text)
        for key, value in _fields(document)
        if key in ("usage", "meta_info")
    ]
    counted = [one for one in found if isinstance(one, dict) and (_count(one) is not None)]
    details = [one.get("prompt_tokens_details") or one.get("input_tokens_details") or one for one in counted]
    cached = [one.get("cached_tokens") or one.get("cache_read_input_tokens") or 0 for one in details]
    return max((_count(one) or 0) for one in counted), max(cached)


def decision(answer: httpx.Response) -> tuple[int, int]:
    """(prompt tokens, ones cached on the chosen worker) as the router predicted them."""
    words = dict(word.split("=", 1) for word in answer.headers["x-kvatlas-decision"].split(";") if "=" in word)
    return int(words["prompt"]), int(words["cached"])


def _count(one: dict[str, Any]) -> int | None:
    """All input tokens: Anthropic's `input_tokens` exclude those read from or written to the cache."""
    counted = one.get("prompt_tokens", one.get("input_tokens"))
    others = sum(one.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
    return None if counted is None else counted + others


def _documents(text: str, lines: list[str] | None = None) -> Iterator[Any]:
    lines = [line for line in text.splitlines() if line.startswith("data:")] if lines is None else lines
    for line in lines or [f"data: {text}"]:
        try:
            yield json.loads(line.removeprefix("data:"))
        except ValueError:
            continue


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for key, inner in (
        value.items() if isinstance(value, dict) else ((None, one) for one in value) if isinstance(value, list) else ()
    ):
        if key is not None:
            yield key, inner
        yield from _fields(inner)
