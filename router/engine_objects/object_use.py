"""Objects that live on the engine that made them: responses, files, batches, assistants, threads, conversations. Which of them
a request names, and which an answer brings."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_ID = 256
"""A longer name is no engine's."""
MOST_READ_BYTES = 1 << 20
"""Longer bodies are not decoded."""

_KINDS = ("responses", "files", "uploads", "batches", "assistants", "threads", "conversations", "vector_stores")
OBJECT_ROUTES = tuple(f"/v1/{kind}{rest}" for kind in _KINDS for rest in ("", "/{rest:path}"))
"""Their paths, as Starlette writes them."""
_OWN = frozenset({"render", "input_tokens", "compact"})
"""Path parts of `/v1/responses` that are calls, not ids."""
_PATH = re.compile(rf"/v1/(?:{'|'.join(_KINDS)})(?:/([^/]+)(?:/.*)?)?/?")
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
_IN_LONG_BODY = re.compile(rb'"(?:previous_response_id|conversation|input_file_id)"\s*:\s*"([\w.-]{1,256})"')


@dataclass(frozen=True, slots=True)
class ObjectUse:
    """What a request has to do with such objects. `ids`: of those that it names; empty: it makes one, or lists them. `lists`:
    it lists them. `kept`: the engine keeps what this request makes."""

    ids: tuple[str, ...] = ()
    lists: bool = False
    kept: bool = True

    @classmethod
    def of(cls, method: str, path: str, body: bytes) -> "ObjectUse | None":
        """None for a request that has nothing to do with them."""
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        decoded = _decode(body) if method == "POST" else {}
        ids = [found[1]] if found[1] and found[1] not in _OWN else []
        for field in _FIELDS:
            ids += _ids_in(decoded.get(field))
        if len(body) > MOST_READ_BYTES:
            ids += [id.decode("ascii", "replace") for id in _IN_LONG_BODY.findall(body)]
        kept = decoded.get("store") is not False
        named = tuple(dict.fromkeys(id for id in ids if len(id) <= MOST_ID))
        return cls(named, lists=method == "GET" and not found[1], kept=kept)

    def made_by(self, body: bytes) -> tuple[str, ...]:
        """From a good answer: the id of its object, and of those that the object names as its results."""
        decoded = _decode(body) if self.kept else {}
        ids = [id for name, id in decoded.items() if name == "id" or name.endswith("_file_id")]
        return tuple(id for id in ids if isinstance(id, str) and 0 < len(id) <= MOST_ID)


def response_id(event: bytes) -> str | None:
    """From the event that begins a stream of OpenAI's responses."""
    response = _decode(event).get("response")
    id = response.get("id") if isinstance(response, Mapping) else None
    return id if isinstance(id, str) and 0 < len(id) <= MOST_ID else None


def _ids_in(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        value = value.get("id")
    values = value if isinstance(value, list) else [value]
    return (one for one in values if isinstance(one, str) and one)


def _decode(body: bytes) -> Mapping[str, Any]:
    if len(body) > MOST_READ_BYTES or body.lstrip()[:1] != b"{":
        return {}
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
