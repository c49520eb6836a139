"""Fields that no tenant's client may send to an engine, because engines treat them as if all clients trusted each other.

`rid` and `request_id` name a request within its engine: SGLang 0.5.23 and vLLM 0.33 keep a response under the name that its
body gives, so a client could replace or read another client's response. `priority` puts a request ahead of all others in the
engine's own queue. In SGLang, `lora_path` and `lora_id` choose an adapter independently of the model, but a client's key is
checked only for the model. `session_params` continues an SGLang request by its name. SGLang before 0.5.22 appends `extra_key`
to the cache salt, so a client could extend its own salt to match another client's. `mm_hashes`, `mm_content_hashes`,
`features` and an image's `uuid` are the names under which engines keep media: with them, a client could make an engine read
another client's image, or replace that image.
"""

import json
from collections.abc import Mapping
from typing import Any

from router_client.pricing.transfer_protocol import NotForClients

FIELDS = frozenset(
    {
        "extra_key",
        "lora_id",
        "lora_path",
        "mm_content_hashes",
        "mm_hashes",
        "priority",
        "request_id",
        "rid",
        "session_params",
    }
)
"""Fields of a body that can be left out; engines still do what the rest of the body asks for."""
PRIORITY_HEADER = b"x-vllm-priority"
HEADERS = frozenset({b"x-request-id", PRIORITY_HEADER})
"""Headers with the same effect in vLLM."""
_FEATURES = "features"
_GENERATE = "/generate"
"""SGLang's own call, where `lora_path` is the only name of a model: a single text counts as that name; a list does not."""
_UUID = "uuid"
_SCHEMAS = "tools"
_OWN_WORDS = frozenset({_SCHEMAS, "arguments"})
"""Fields inside which all names are the client's own."""
_MEDIA = ("image", "audio", "video", "vision")


def withhold_from_tenants(path: str, body: bytes, decoded: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The decoded body and its text, without the fields that tenants' clients may not send. Raises NotForClients for a field
    that can't be left out."""
    if decoded.get(_FEATURES):
        raise NotForClients(f"{_FEATURES} is in the body; remove it: clients of several tenants may not name media")
    foreign = FIELDS & decoded.keys()
    if path == _GENERATE and isinstance(decoded.get("lora_path"), str):
        foreign -= {"lora_path"}
    kept = {name: value for name, value in decoded.items() if name not in foreign} if foreign else decoded
    if _UUID.encode() in body or b"\\u00" in body:
        kept = _without_uuids(kept)
    return (decoded, body) if kept == decoded else (kept, json.dumps(kept).encode())


def is_refused(name: str, within: str | None) -> bool:
    """True if a large body from a tenant's client must not have a field of this name; such a body is not decoded. `within`:
    the field of the body that contains it; None: it is a field of the body itself."""
    if within is None:
        return name in FIELDS or name == _FEATURES
    return name == _UUID and within != _SCHEMAS


def _without_uuids(value: Any, *, is_part: bool = False) -> Any:
    """The value without the names of media in its parts. Recursion is safe, because the depth of a decoded body is
    bounded."""
    if isinstance(value, list):
        return [_without_uuids(one, is_part=True) for one in value]
    if not isinstance(value, dict):
        return value
    left_out = _UUID if is_part and _UUID in value and _is_media(value) else None
    return {
        name: one if name in _OWN_WORDS or (is_part and name == "input") else _without_uuids(one)
        for name, one in value.items()
        if name != left_out
    }


def _is_media(part: Mapping[str, Any]) -> bool:
    return any(word in str(text) for text in (part.get("type"), *part) for word in _MEDIA)
