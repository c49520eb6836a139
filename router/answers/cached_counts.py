"""Removes engines' counts of cached tokens from answers. All other bytes stay as the engine wrote them.

For a prompt that another tenant has sent, these counts reveal how much of it an engine still has. vLLM, SGLang and
TensorRT-LLM write them inside `usage`, `meta_info` and `sglext`, in members whose names contain "cache".
"""

import re
from dataclasses import dataclass

_MARK = b"cache"
_COUNTS = frozenset({b"usage", b"meta_info", b"sglext"})
_LEADS = frozenset({b"", b"choices", b"delta", b"message", b"response"})
"""Members that may contain counts (an element of a list has no name). All others are the answer's own content."""
_NULLED = b"input_tokens_details"
"""OpenAI's SDKs require all of its members."""
_APART = frozenset({b"cache_read_input_tokens", b"cache_creation_input_tokens"})
"""In Anthropic's messages, `input_tokens` does not include these."""
_STRING = rb'"[^"\\\r\n]*+(?:\\.[^"\\\r\n]*+)*+"?+'
_TOKEN = re.compile(rb"(" + _STRING + rb")(\s*:\s*)?|[{}\[\]]")
_NEXT_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|\[[^"{}\[\]]*+\]|' + _STRING + rb")*+[{}\[\]]")
_SCALAR = re.compile(_STRING + rb'|[^\s,"{}\[\]]*')
_COMMA = re.compile(rb'\s*,(?:\s*(?="))?')
_END_OF_EVENT = re.compile(rb"((?:\r\n|\n|\r(?!\n)){2})")


@dataclass(slots=True)
class _Container:
    """An object or list. `counts`: it is one of `_COUNTS`, or inside one. `listed`: it is a list, or inside one. `input`:
    its `input_tokens`, which do not include `apart`."""

    name: bytes
    counts: bool
    listed: bool
    input: re.Match[bytes] | None = None
    apart: int = 0


def events_without_cached_counts(events: bytes) -> bytes:
    """The server-sent events without their counts of cached tokens. Each event must be whole, except for the last one
    of a stream."""
    if _MARK not in events:
        return events
    return b"".join(map(without_cached_counts, _END_OF_EVENT.split(events)))


def without_cached_counts(text: bytes) -> bytes:
    """A JSON text, or an event that contains one, without its counts of cached tokens. Such a member is removed, or becomes
    null if it is required or is the only one. Anthropic's `input_tokens` then count the whole prompt, as when an engine
    reports no cached tokens."""
    if _MARK not in text:
        return text
    changes: list[tuple[int, int, int, bytes]] = []
    around: list[_Container] = []
    name, at = b"", 0
    while (found := _TOKEN.search(text, at)) is not None:
        at = found.end()
        inner = around[-1] if around else _Container(b"", counts=False, listed=False)
        if found[2] is not None:
            name = found[1].strip(b'"')
            if not inner.counts:
                continue
            value = _SCALAR.match(text, at)
            assert value is not None
            if name == b"input_tokens" and value[0].isdigit():
                inner.input = value
            elif _MARK in name:
                if name in _APART and value[0].isdigit():
                    inner.apart += int(value[0])
                end = value.end() if value[0] else _end_of(text, at)
                changes.append((found.start(), at, end, b"null" if inner.name == _NULLED else b""))
                at = end
        elif found[0] in b"{[":
            counts, end = inner.counts or name in _COUNTS, None
            leads = counts or name in _LEADS
            listed = inner.listed or found[0] == b"["
            if not leads or (listed and not inner.listed):  # mostly log probabilities
                end = _end_of(text, found.start())
                leads = leads and text.find(_MARK, at, end) >= 0
            if leads:
                around.append(_Container(name, counts, listed))
            else:
                assert end is not None
                at = end
            name = b""
        elif found[0] in b"}]":
            if around:
                changes += _with_apart(around.pop())
            name = b""
    for container in around:  # a stream may end within an event
        changes += _with_apart(container)
    return _changed(text, sorted(changes))


def _end_of(text: bytes, at: int) -> int:
    """The end of the object or list that begins at `at`; for any other value, its beginning."""
    if text[at : at + 1] not in (b"{", b"["):
        return at
    depth, at = 1, at + 1
    while depth and (found := _NEXT_BRACKET.match(text, at)) is not None:
        at = found.end()
        depth += 1 if text[at - 1] in b"{[" else -1
    return at if depth == 0 else len(text)


def _with_apart(container: _Container) -> list[tuple[int, int, int, bytes]]:
    value = container.input
    if value is None or not container.apart:
        return []
    return [(value.start(), value.start(), value.end(), b"%d" % (int(value[0]) + container.apart))]


def _changed(text: bytes, changes: list[tuple[int, int, int, bytes]]) -> bytes:
    """The text with these `changes`. Each gives a member's beginning, its value's beginning and end, and the new value;
    if that is empty, the member is removed."""
    parts, at = [b""], 0
    for begin, value, end, new in changes:
        if at < begin:
            parts.append(text[at:begin])
        at = end
        if new:
            parts.append(text[begin:value] + new)
        elif (comma := _COMMA.match(text, end)) is not None:
            at = comma.end()
        elif (before := parts[-1].rstrip()).endswith(b","):
            parts[-1] = before[:-1]
        else:
            parts.append(text[begin:value] + b"null")
    return b"".join([*parts, text[at:]])
