"""Reads from any request what a router needs to find a worker for it: the model that it names, and about how long its prompt
is."""

import json
import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

from kvatlas.errors import InvalidValue
from kvatlas_router.proxy.large_body import find_model
from kvatlas_router.tokens.text_request import Api, TextRequest, is_large, parse_object
from router_client.pricing.transfer_protocol import replace_fields, withdraw_transfer_fields

MOST_LETTERS = 1 << 20
"""A longer body counts as this long: most of it is no text."""

MAX_FORM_FIELDS = 1_000
MAX_FORM_TEXT = 1_024

INFERENCE = frozenset(
    {
        *(api.value for api in Api),
        "/classify",
        "/detokenize",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/classify",
        "/v1/embeddings",
        "/v1/messages/count_tokens",
        "/v1/moderations",
        "/v1/rerank",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""Calls of vLLM 0.33 and SGLang 0.5 that may leave out the model if there is only one."""

_ADMINISTRATION = re.compile(
    r"/(?:v1/)?(?:(?:un)?load_lora_adapter|(?:un)?load_lora_adapter_from_tensors|sleep|wake_up|is_sleeping|collective_rpc|abort.*|"
    r"reset_.*|flush_.*|clear_.*|start_.*|stop_.*|scale_.*|is_scaling.*|update_.*|init_.*|destroy_.*|get_.*|set_.*|"
    r"release_.*|resume_.*|pause_.*|continue_.*|slow_down|freeze_gc|configure_logging|server_info|kv_.*|internal.*|"
    r"docs|redoc|openapi.json|metrics|ping|load|dump_.*|open_session|close_session|add_external_corpus.*|hicache.*)(?:/.*)?"
)
"""Paths of engines for those that run them: never passed on."""


_APIS = frozenset(api.value for api in Api)
_OBJECT = re.compile(rb"\s*\{")


class NotForEngines(InvalidValue):
    """No engine gets a request with this path."""


class AdministrationPath(NotForEngines):
    """It is for those that run the engines."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """`body`: as engines get it. `text`: a request for tokens (`Api`) as far as a router reads it; None for any other call."""

    model: str | None
    body: bytes
    letters: int = 0
    text: TextRequest | None = None


async def read_call(method: str, path: str, query: bytes, content_type: str, body: bytes) -> EngineCall:
    """Raises InvalidValue for a chat or a completion without a prompt, NotForEngines for a path that is not passed on, and
    NotForClients.

    The prompt of a large request is not read. Fields of a transfer are withdrawn.
    """
    api = Api(path) if method == "POST" and path in _APIS and not is_large(body) else None
    if api is not None and not _has_embeddings_only(body) and (text := _read_text(api, body)) is not None:
        if withdrawn := withdraw_transfer_fields(text.body):
            text = replace(text, body={**text.body, **withdrawn})
            body = json.dumps(text.body).encode()
        return EngineCall(text.model, body, text=text)
    if _ADMINISTRATION.fullmatch(path) or "//" in path or "/.." in path or "/./" in path:
        raise AdministrationPath(f"{path[:200]} is not passed on to engines")
    named, body = await _named_model(query, content_type, body)
    if named is None and path not in INFERENCE:
        raise NotForEngines(f"{path[:200]} is no path of this router, and the request names no model")
    letters = min(len(body), MOST_LETTERS) if "json" in content_type else 0
    return EngineCall(named, body, letters)


def _read_text(api: Api, body: bytes) -> TextRequest | None:
    """None for a body that can't be read, if its engine is to say what is wrong with it."""
    try:
        return TextRequest.parse(api, body)
    except InvalidValue:
        if api.is_checked:
            raise
        return None


def _has_embeddings_only(body: bytes) -> bool:
    """Is it a completion of vLLM's whose prompt is no text and no tokens?"""
    if b'"prompt_embeds"' not in body:
        return False
    decoded = parse_object(body)
    return bool(decoded.get("prompt_embeds")) and not decoded.get("prompt")


async def _named_model(query: bytes, content_type: str, body: bytes) -> tuple[str | None, bytes]:
    """And the body without the fields of a transfer."""
    found: object = None
    if content_type.startswith("multipart/form-data"):
        found = _form_field(content_type, body, b"model")
    elif body and ("json" in content_type or _OBJECT.match(body)):
        if is_large(body):
            return await find_model(body), body
        try:
            decoded = parse_object(body)
        except InvalidValue:  # for the engine to judge
            decoded = {}
        found = decoded.get("model")
        body = replace_fields(decoded, body, withdraw_transfer_fields(decoded))
    if not found and query:
        found = parse_qs(query.decode("latin-1")).get("model", [None])[0]
    return (found if isinstance(found, str) and found else None), body


def _form_field(content_type: str, body: bytes, name: bytes) -> str | None:
    """A short text field of a multipart form (RFC 7578); None without one."""
    found = re.search(r'boundary="?([^";,]+)"?', content_type)
    if found is None:
        return None
    wanted = re.compile(
        rb'content-disposition:[^\r\n]*;\s*name="?' + re.escape(name) + rb'"?\s*(?:[;\r]|$)', re.IGNORECASE
    )
    border, at = b"--" + found[1].encode("latin-1"), 0
    for _ in range(MAX_FORM_FIELDS):
        start = body.find(border, at)
        if start < 0:
            return None
        at = start + len(border)
        part = body[at : at + 3 * MAX_FORM_TEXT].split(border, 1)[0]
        head, _, value = part.partition(b"\r\n\r\n")
        if len(head) < MAX_FORM_TEXT and wanted.search(head):
            return value.removesuffix(b"\r\n")[:MAX_FORM_TEXT].decode("utf-8", "replace")
    return None
