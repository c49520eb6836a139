"""Reads what a router needs to find a worker for a request: the model that it names, and its prompt's approximate length."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas_router.proxy.form_body import find_form_model
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.proxy.json_body import UnreadableBody, read_object
from kvatlas_router.proxy.large_body import find_model
from kvatlas_router.tenancy.withheld_fields import withhold_from_tenants
from kvatlas_router.tokens.text_request import Api, TextRequest, is_large
from router_client.pricing.transfer_protocol import replace_fields, withdraw_transfer_fields

MOST_LETTERS = 1 << 20
"""A longer body counts as this long, since most of it is not text."""
FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Calls whose body is a form; all others take JSON."""

INFERENCE = frozenset(
    {
        *FORMS,
        *(api.value for api in Api),
        "/classify",
        "/cohere/v2/chat",
        "/detokenize",
        "/encode",
        "/generative_scoring",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/speech",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/classify",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/decisions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/moderations",
        "/v1/rerank",
        "/v1/responses/render",
        "/v1/score",
        "/v1/systemone",
        "/v1/tokenize",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""The inference calls (POST) of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.3. They may omit the model if there is only one."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """`body`: the body that engines get. `text`: the parsed request for tokens (`Api`); None for any other call."""

    model: str | None
    body: bytes
    letters: int = 0
    text: TextRequest | None = None

    def salted(self, path: str, salt_of: Callable[[str | None], str | None]) -> "EngineCall":
        """The call with its tenant's cache salt. Raises InvalidValue for a body that can't be given one."""
        if path in FORMS or not self.body:
            return self
        if is_large(self.body):
            raise InvalidValue(f"the body has {len(self.body)} bytes, too many to keep tenants' caches apart")
        decoded = self.text.body if self.text is not None else read_object(self.body)[0]
        own = decoded.get("cache_salt")
        fields = {"cache_salt": salt_of(own if isinstance(own, str) and own else None)}
        body = replace_fields(decoded, self.body, fields)
        text = None if self.text is None else replace(self.text, body={**decoded, **fields})
        return replace(self, body=body, text=text)


async def read_call(
    method: str, path: str, query: bytes, content_type: str, body: bytes, *, of_tenant: bool = False
) -> EngineCall:
    """Read a call by its path, as engines do, whatever its content type. The prompt of a large request is not read. Fields that
    clients must not send to engines are removed; with `of_tenant`, also those that must not be sent by a client among several
    tenants.

    Raises InvalidValue for a chat or a completion without a prompt, UnreadableBody, or NotForClients.
    """
    if is_form(path, content_type):
        return EngineCall(find_form_model(content_type, body, of_tenant=of_tenant) or _model_in_query(query), body)
    letters = min(len(body), MOST_LETTERS)
    if not body:
        return EngineCall(_model_in_query(query), body)
    if is_large(body):
        return EngineCall(await find_model(body, of_tenant=of_tenant) or _model_in_query(query), body, letters)
    decoded, body = read_object(body)
    if withdrawn := withdraw_transfer_fields(decoded):
        body, decoded = replace_fields(decoded, body, withdrawn), {**decoded, **withdrawn}
    if of_tenant:
        decoded, body = withhold_from_tenants(path, body, decoded)
    has_embeddings_only = decoded.get("prompt_embeds") and not decoded.get("prompt")  # vLLM's
    api = _APIS.get(path) if method == "POST" and not has_embeddings_only else None
    if api is not None and (text := _read_text(api, decoded)) is not None:
        return EngineCall(text.model, body, text=text)
    named = decoded.get("model")
    return EngineCall(named if isinstance(named, str) and named else _model_in_query(query), body, letters)


_APIS = {api.value: api for api in Api}


def _read_text(api: Api, decoded: Mapping[str, Any]) -> TextRequest | None:
    """The parsed request; None if it is invalid and the engine should report the error."""
    try:
        return TextRequest.of(api, decoded)
    except InvalidValue:
        if api.is_checked:
            raise
        return None


def is_ambiguous(path: str) -> bool:
    """True for a decoded path that an engine, or HTTP software before it, may mistake for a different one because it has
    empty or dotted parts, or non-printable characters, such as the line end that Python's `$` ignores at the end."""
    parts = path.split("/")[1:]
    return "" in parts[:-1] or bool({".", ".."} & set(parts)) or not path.isprintable()


def read_type(headers: RawHeaders) -> str:
    """The body's type. Raises UnreadableBody unless engines can read its encoding, and agree on its type."""
    types = []
    for name, value in headers:
        if name == b"content-type":
            types.append(value)
        elif name in (b"content-encoding", b"x-body-compressed") and value.strip().lower() not in (b"", b"identity"):
            said = value.decode("latin-1")
            raise UnreadableBody(f"{name.decode()} is {said[:80]!r}; remove it: engines read no compressed bodies")
    if len(types) > 1:
        raise UnreadableBody("content-type is given more than once; expected one")
    return types[0].decode("latin-1") if types else ""


def is_form(path: str, content_type: str) -> bool:
    """True if the call's body is read as a form; any other is read as JSON, whatever its content type, as engines do."""
    return path in FORMS or (path not in INFERENCE and content_type.lower().startswith("multipart/"))


def _model_in_query(query: bytes) -> str | None:
    return parse_qs(query.decode("latin-1")).get("model", [None])[-1] if query else None
