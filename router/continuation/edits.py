"""Changes to the bytes of an event with a JSON text. All other bytes stay as the engine wrote them.

Names are found by their quotes: within a JSON text's values, quotes are escaped, so `"usage":` is always a member.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TEXT = rb'"(?:[^"\\]|\\.)*"'
_IDENTITY = ("id", "request_id", "object", "created", "model")
_IDENTITY_VALUES = {name: re.compile(rb'("%s"\s*:\s*)(%s|-?\d+|null)' % (name.encode(), _TEXT)) for name in _IDENTITY}
_CHOICES = re.compile(rb'"choices"\s*:')
_OBJECT = rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_USAGE = re.compile(rb'"usage"\s*:\s*(' + _OBJECT + rb")")
_TOKEN_IDS = re.compile(rb'("(?:prompt_)?token_ids"\s*:\s*)\[[\d,\s]*\]')
_PROMPT_TOKEN_IDS = re.compile(rb'("prompt_token_ids"\s*:\s*)\[[\d,\s]*\]')
_OFFSETS = re.compile(rb'("text_offset"\s*:\s*\[)([\d,\s]*)\]')
_ANSWER = re.compile(rb'("(?:content|text|thinking)"\s*:\s*)(' + _TEXT + rb")")
_DELTA = re.compile(rb'("delta"\s*:\s*)\{(?:[^{}"]|' + _TEXT + rb")*\}")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*(null|' + _TEXT + rb")")
_STOP = re.compile(rb'"stop_reason"\s*:\s*(null|-?\d+|' + _TEXT + rb")")
_OWN_IDS = re.compile(rb'("token_ids"\s*:\s*)(?:null|\[[\d,\s]*\])')
_INDEX = re.compile(rb'("choices"\s*:\s*\[\s*\{[^{}\[\]]*?"index"\s*:\s*)\d+')
_ROLE = re.compile(rb'"role"\s*:\s*"assistant"\s*,\s*')


def identity_of(raw: bytes) -> dict[str, bytes]:
    """The values of an event that are the same in all events of its stream."""
    head = _head(raw)
    found = {name: pattern.search(raw, 0, head) for name, pattern in _IDENTITY_VALUES.items()}
    return {name: match[2] for name, match in found.items() if match is not None}


def with_identity(raw: bytes, identity: Mapping[str, bytes]) -> bytes:
    """The event with the identity of another stream."""
    for name, value in identity.items():
        found = _IDENTITY_VALUES[name].search(raw, 0, _head(raw))
        if found is not None:
            raw = raw[: found.start(2)] + value + raw[found.end(2) :]
    return raw


def without_usage(raw: bytes) -> bytes:
    """The event without its usage."""
    found = _USAGE.search(raw)
    if found is None:
        return raw
    before, after = raw[: found.start()], raw[found.end() :]
    if (trimmed := before.rstrip()).endswith(b","):
        return trimmed[:-1] + after
    return before + after.lstrip().removeprefix(b",").lstrip()


def with_usage(raw: bytes, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> bytes:
    """The event with its usage changed."""
    found = _USAGE.search(raw)
    if found is None:
        return raw
    spaced = b": " in found[1]
    usage = json.dumps(change(json.loads(found[1])), separators=(", ", ": ") if spaced else (",", ":"))
    return raw[: found.start(1)] + usage.encode() + raw[found.end(1) :]


def without_token_ids(raw: bytes) -> bytes:
    """The event without its token ids and without the prompt's."""
    return _TOKEN_IDS.sub(rb"\1null", raw)


def without_prompt_ids(raw: bytes) -> bytes:
    """The event without the ids of the prompt's tokens."""
    return _PROMPT_TOKEN_IDS.sub(rb"\1null", raw)


def with_offsets(raw: bytes, letters: int) -> bytes:
    """The event with the text offsets of its tokens moved by this many characters."""

    def move(found: re.Match[bytes]) -> bytes:
        moved = re.sub(rb"\d+", lambda one: b"%d" % (int(one[0]) + letters), found[2])
        return found[1] + moved + b"]"

    return _OFFSETS.sub(move, raw, count=1)


def with_text(raw: bytes, text: str) -> bytes:
    """The event with another part of the answer."""
    return _ANSWER.sub(lambda found: found[1] + json.dumps(text, ensure_ascii=raw.isascii()).encode(), raw, count=1)


def with_delta(raw: bytes, delta: Mapping[str, str]) -> bytes:
    """A chat's event with another delta."""
    text = json.dumps(delta, separators=(",", ":"), ensure_ascii=raw.isascii())
    return _DELTA.sub(lambda found: found[1] + text.encode(), raw, count=1)


def with_ids(raw: bytes, ids: Sequence[int]) -> bytes:
    """The event with other token ids."""
    listed = json.dumps(list(ids), separators=(",", ":")).encode()
    return _OWN_IDS.sub(lambda found: found[1] + listed, raw, count=1)


def with_finish_of(raw: bytes, other: bytes) -> bytes:
    """The event with the finish reason and the stop reason of another event."""
    finish, own, stop = _FINISH.search(other), _FINISH.search(raw), _STOP.search(other)
    if finish is None or own is None or finish[1] == own[1]:
        return raw
    raw, end = raw[: own.start(1)] + finish[1] + raw[own.end(1) :], own.start(1) + len(finish[1])
    if stop is None:
        return raw
    if (has := _STOP.search(raw)) is not None:
        return raw[: has.start(1)] + stop[1] + raw[has.end(1) :]
    return raw[:end] + b"," + stop[0] + raw[end:]


def with_index(raw: bytes, index: int) -> bytes:
    """The event with another choice index. The index must come before the choice's text or delta."""
    return _INDEX.sub(rb"\g<1>%d" % index, raw, count=1)


def without_role(raw: bytes) -> bytes:
    """The event without the role before its text."""
    return _ROLE.sub(b"", raw, count=1)


def _head(raw: bytes) -> int:
    found = _CHOICES.search(raw)
    return len(raw) if found is None else found.start()
