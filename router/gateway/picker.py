"""What a stream asks and tells: the interface between the gateway's protocol and the decision."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

from google.protobuf.struct_pb2 import Struct

from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.engine_objects.object_use import ObjectUse
from kvatlas_router.gateway.ext_proc.messages import first_value
from kvatlas_router.gateway.field_metrics import RequestLabels
from kvatlas_router.proxy.client_request import ErrorKind, error_body
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.tokens.text_request import TextRequest
from router_client.learning.timings import Timings
from router_client.learning.usage import Usage


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's headers, pseudo headers (`:method`, `:path`) among them, with names in lower case.

    `metadata`: Envoy's dynamic metadata by namespace, which only the gateway's own filters set. `subset`: the only endpoints
    (ip:port) that may be chosen, as the gateway says; None: it leaves that to the picker.
    """

    headers: RawHeaders
    subset: tuple[str, ...] | None = None
    metadata: Mapping[str, Struct] = field(default_factory=dict)

    def first(self, name: bytes) -> str | None:
        """The first value of a header that is not empty."""
        return first_value(self.headers, name)

    @property
    def method(self) -> str:
        return self.first(b":method") or "POST"

    @property
    def path(self) -> str:
        """Without the query, and decoded, as engines read it."""
        return unquote((self.first(b":path") or "").partition("?")[0])

    @property
    def query(self) -> bytes:
        return (self.first(b":path") or "").partition("?")[2].encode()


@dataclass(frozen=True, slots=True)
class Renaming:
    """The model that the engine is asked for, and the client's name for it."""

    target: str
    model: str


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes: endpoints (ip:port), the next ones for the gateway's retries.

    `headers` are added to the request, `withdrawn` ones taken from it. `body` replaces its body; None: that stays.
    """

    endpoints: Sequence[str]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    withdrawn: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """No endpoint gets the request. `retry_after_s`: when it may come again, as the client is told; None: not at all."""

    kind: ErrorKind
    line: str
    retry_after_s: int | None = 1

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        return headers if self.retry_after_s is None else {**headers, "retry-after": str(self.retry_after_s)}

    @property
    def body(self) -> bytes:
        """An error in the words of OpenAI's API."""
        return json.dumps(error_body(self.kind, self.line)).encode()


class PickedRequest(Protocol):
    """A request whose destination is decided, told what becomes of it.

    First `begin` if an answer begins, then `pass_part` for each part, `first_token` and `keep`, then one of `finish`, `fail`
    and `leave`; a request that was never answered has only the last. None of them raises if the store does not answer.
    """

    @property
    def destination(self) -> Destination: ...

    @property
    def text(self) -> TextRequest | None:
        """The request, if it is a completion or a chat whose usage can be compared; None: its answer is not read."""
        ...

    @property
    def hides_usage(self) -> bool:
        """The stream's usage was asked for by the picker: the client doesn't get it."""
        ...

    @property
    def renaming(self) -> Renaming | None:
        """Its answer gets the client's name for the model back."""
        ...

    @property
    def objects(self) -> ObjectUse | None:
        """Those that engines keep, and that it names or makes."""
        ...

    @property
    def labels(self) -> RequestLabels:
        """For metrics."""
        ...

    @property
    def answer_headers(self) -> Mapping[str, str]:
        """Headers to add to the answer."""
        ...

    async def begin(self, status: int, headers: RawHeaders, served: str | None) -> None:
        """An answer begins, from the endpoint `served` if the gateway says so."""
        ...

    def pass_part(self, part: bytes) -> None:
        """A part of the answer's body passes."""
        ...

    async def first_token(self) -> None:
        """The prefill is over."""
        ...

    async def finish(self, usage: Usage | None, timings: Timings | None) -> None:
        """The answer is complete."""
        ...

    async def keep(self, ids: Sequence[str]) -> None:
        """Its engine keeps these objects, which the answer brings."""
        ...

    async def fail(self, error: EngineError | None = None) -> None:
        """There is no answer, it is none of status 2xx, or it was not passed to its end. `error`: it has status 200, and
        reports this instead."""
        ...

    async def leave(self) -> None:
        """The answer goes on without the picker, which will not hear of its end."""
        ...


class EndpointPicker(Protocol):
    """Decides for one pool; safe to share between tasks of one event loop."""

    def wants_body(self, head: RequestHead) -> bool:
        """Does the decision read the body of this request?"""
        ...

    async def pick(self, head: RequestHead, body: bytes | None, *, may_hide_usage: bool) -> PickedRequest | Refusal:
        """Where a request goes. `body` None: it was not waited for. `may_hide_usage`: the answer passes through here, and
        parts of it can be left out."""
        ...
