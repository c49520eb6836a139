"""The interface between the gateway's protocol and the decision: what a stream asks and reports."""

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
from router_client.learning.token_counts import Usage


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's headers, including pseudo headers (`:method`, `:path`), with names in lower case.

    `metadata`: Envoy's dynamic metadata by namespace, which only the gateway's own filters set. `subset`: the endpoints
    (ip:port) to which the gateway restricts the choice; None: no restriction.
    """

    headers: RawHeaders
    subset: tuple[str, ...] | None = None
    metadata: Mapping[str, Struct] = field(default_factory=dict)

    def first(self, name: bytes) -> str | None:
        """The header's first value that is not empty."""
        return first_value(self.headers, name)

    @property
    def method(self) -> str:
        return self.first(b":method") or "POST"

    @property
    def path(self) -> str:
        """The path without the query, decoded in the way that engines decode it."""
        return unquote((self.first(b":path") or "").partition("?")[0])

    @property
    def query(self) -> bytes:
        return (self.first(b":path") or "").partition("?")[2].encode()


@dataclass(frozen=True, slots=True)
class Renaming:
    """The model to request from the engine, and the client's name for it."""

    target: str
    model: str


@dataclass(frozen=True, slots=True)
class Destination:
    """A request's destination: its endpoint (ip:port), followed by fallbacks for the gateway's retries.

    `headers` are added to the request, `withdrawn` ones removed. `body` replaces its body; None: unchanged.
    """

    endpoints: Sequence[str]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    withdrawn: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """No endpoint gets the request. `retry_after_s`: sent to the client as Retry-After; None: retrying won't help."""

    kind: ErrorKind
    line: str
    retry_after_s: int | None = 1

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        return headers if self.retry_after_s is None else {**headers, "retry-after": str(self.retry_after_s)}

    def body(self, path: str) -> bytes:
        """An error in the form of the path's API."""
        return json.dumps(error_body(path, self.kind, self.line)).encode()


class PickedRequest(Protocol):
    """A request whose destination has been decided. The stream reports its progress here.

    Calls come in this order: `begin` if an answer begins, `pass_part` for each part, `first_token` and `keep`, and finally
    one of `finish`, `fail` and `leave`, which is the only call for a request that is never answered. None of these calls
    raises if the store does not answer.
    """

    @property
    def destination(self) -> Destination: ...

    @property
    def text(self) -> TextRequest | None:
        """The request, if it is a completion or a chat whose usage can be compared; None: don't read its answer."""
        ...

    @property
    def hides_usage(self) -> bool:
        """True if only the picker asked for the stream's usage, so the client must not get it."""
        ...

    @property
    def renaming(self) -> Renaming | None:
        """Set if the answer must name the model as the client did."""
        ...

    @property
    def objects(self) -> ObjectUse | None:
        """The objects, kept by engines, that the request names or creates."""
        ...

    @property
    def labels(self) -> RequestLabels:
        """Labels for metrics."""
        ...

    @property
    def answer_headers(self) -> Mapping[str, str]:
        """Headers to add to the answer."""
        ...

    async def begin(self, status: int, headers: RawHeaders, served: str | None) -> None:
        """Report that an answer begins. `served`: the endpoint that answered, if the gateway names it."""
        ...

    def pass_part(self, part: bytes) -> None:
        """Pass a part of the answer's body."""
        ...

    async def first_token(self) -> None:
        """Report that the prefill is over."""
        ...

    async def finish(self, usage: Usage | None, timings: Timings | None) -> None:
        """Report that the answer is complete."""
        ...

    async def keep(self, ids: Sequence[str]) -> None:
        """Report that the answer created these objects, which its engine keeps."""
        ...

    async def fail(self, error: EngineError | None = None) -> None:
        """Report that there is no answer, that its status is not 2xx, or that it was cut off. `error`: an error reported
        inside an answer with status 200."""
        ...

    async def leave(self) -> None:
        """Report that the answer bypasses the picker, which will not see its end."""
        ...


class EndpointPicker(Protocol):
    """Decides for one pool. Can be shared between tasks of one event loop."""

    def wants_body(self, head: RequestHead) -> bool:
        """True if the decision needs this request's body."""
        ...

    async def pick(self, head: RequestHead, body: bytes | None, *, may_hide_usage: bool) -> PickedRequest | Refusal:
        """Decide where a request goes. `body=None`: the body was not waited for. `may_hide_usage`: the answer passes
        through the picker, which can drop parts of it."""
        ...
