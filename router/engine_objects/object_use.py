"""Objects that live on the engine that made them: responses, files, batches, assistants, threads, conversations. Finds those
that a request names and those that an answer creates."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.tokens.text_request import is_large

MOST_ID = 256
"""Length limit for an id. No engine creates longer ones."""
MOST_ANSWER_BYTES = 1 << 20
"""Size limit: longer answers are not decoded."""

_KINDS = ("responses", "files", "uploads", "batches", "assistants", "threads", "conversations", "vector_stores")
OBJECT_ROUTES = tuple(f"/v1/{kind}{rest}" for kind in _KINDS for rest in ("", "/{rest:path}"))
"""The paths of these objects, in Starlette's notation."""
_OWN = frozenset({"render", "input_tokens", "compact", "runs"})
"""Parts of paths below `/v1/responses` and `/v1/threads` that are calls, not ids."""
_PATH = re.compile(rf"/v1/(?:{'|'.join(_KINDS)})(?:/([^/]+)(?:/.*)?)?/?", re.DOTALL)
_FIELDS = (
    "previous_response_id",
    "conversation",
    "input_file_id",
    "file_id",
    "file_ids",
    "assistant_id",
    "thread_id",
    "vector_store_id",
)
_IN_PARTS = frozenset(
    {
        *("file", "input_file", "input_image", "input_audio", "image_file", "image", "document", "container_upload"),
        *("file_search", "code_interpreter"),
    }
)
"""Types of message parts and tools that name such objects. A tool call's arguments don't name any: they are free text."""
_UNDER_PARTS = ("file", "source", "image_file", "container")
_LISTS = ("attachments", "files", "tool_resources")
"""Fields of messages, threads, assistants and batches of files; each member names objects."""
_HOLD_PARTS = ("messages", "content", "output", "tools", "thread")
"""Fields that hold message parts, tools and messages. `input` is read only at the top level: a tool's `input` is free
text."""
_IN_PLACES = ("file_id", "file_ids", "vector_store_ids")
"""Fields of message parts, tools and attachments that name objects."""
_MOST_NESTED = 8
_IN_LONG_BODY = re.compile(rb'"(?:previous_response_id|conversation|input_file_id)"\s*:\s*"([\w.-]{1,256})"')


@dataclass(frozen=True, slots=True)
class ObjectUse:
    """How a request uses such objects. `ids`: the objects that it names; empty if it creates one or lists them. `lists`:
    it lists objects. `kept`: the engine keeps the object that this request creates."""

    ids: tuple[str, ...] = ()
    lists: bool = False
    kept: bool = True

    @classmethod
    def of(cls, method: str, path: str, body: bytes, decoded: Mapping[str, Any] | None = None) -> "ObjectUse | None":
        """None for a request that uses no such objects. `decoded`: the decoded body, if the request is one for tokens and
        has already been decoded."""
        found = _PATH.fullmatch(path)
        if found is None:
            ids = list(_ids_in_parts(decoded or _decode(body))) if _may_name_files(body) else []
            return cls(_named(ids), kept=False) if ids else None
        decoded = decoded or (_decode(body) if method == "POST" else {})
        ids = [found[1]] if found[1] and found[1] not in _OWN else []
        for field in _FIELDS:
            ids += _ids_in(decoded.get(field))
        if _may_name_files(body):
            ids += _ids_in_parts(decoded)
        if is_large(body):
            ids += [id.decode("ascii", "replace") for id in _IN_LONG_BODY.findall(body)]
        kept = decoded.get("store") is not False
        return cls(_named(ids), lists=method == "GET" and not found[1], kept=kept)

    def made_by(self, body: bytes) -> tuple[str, ...]:
        """Ids in a successful answer: that of the object itself, and those of the files that it lists as results."""
        decoded = _decode(body) if self.kept and len(body) <= MOST_ANSWER_BYTES else {}
        ids = [id for name, id in decoded.items() if name == "id" or name.endswith("_file_id")]
        return tuple(id for id in ids if isinstance(id, str) and 0 < len(id) <= MOST_ID)


def is_object_field(name: str, within: str | None) -> bool:
    """True if a field of this name may name an object. `within`: the field of the body that contains it; None: the body
    itself."""
    return name in (_FIELDS if within is None else _IN_PLACES)


def response_id(event: bytes) -> str | None:
    """The id in the first event of a stream of OpenAI's Responses API."""
    response = _decode(event).get("response")
    id = response.get("id") if isinstance(response, Mapping) else None
    return id if isinstance(id, str) and 0 < len(id) <= MOST_ID else None


def _named(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for id in ids if len(id) <= MOST_ID))


def _may_name_files(body: bytes) -> bool:
    """True if the text may contain a field that names files or vector stores, possibly with escaped characters."""
    return b"file_id" in body or b"vector_store_id" in body or b"\\u00" in body


def _ids_in_parts(value: Any, nested: int = _MOST_NESTED) -> Iterator[str]:
    """Ids in message parts and tools of OpenAI's and Anthropic's APIs."""
    for one in value if isinstance(value, list) else (value,):
        if not isinstance(one, dict):
            continue
        if isinstance(kind := one.get("type"), str) and kind in _IN_PARTS:
            yield from _ids_of(one)
            for field in _UNDER_PARTS:
                yield from _ids_of(one.get(field))
        for field in _LISTS:
            held = one.get(field)
            for each in held.values() if isinstance(held, dict) else held if isinstance(held, list) else ():
                yield from _ids_of(each)
        for field in _HOLD_PARTS if nested else ():
            yield from _ids_in_parts(one.get(field), nested - 1)
    if nested == _MOST_NESTED and isinstance(value, dict):
        yield from _ids_in_parts(value.get("input"), nested - 1)


def _ids_of(value: Any) -> Iterator[str]:
    for field in _IN_PLACES if isinstance(value, dict) else ():
        yield from _ids_in(value.get(field))


def _ids_in(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        value = value.get("id")
    values = value if isinstance(value, list) else [value]
    return (one for one in values if isinstance(one, str) and one)


def _decode(body: bytes) -> Mapping[str, Any]:
    if is_large(body) or body.lstrip()[:1] != b"{":
        return {}
    try:
        decoded = decode(body)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
