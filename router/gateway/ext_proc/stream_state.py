"""One stream of external processing as a state machine: what the gateway has sent, and what may be sent back at which point.
No I/O.

A stream is one HTTP request. The request and its answer are two halves, each in the order headers, body, trailers; replies
keep that order. In full duplex, the whole request is held until its destination is known. In the other modes each message gets
one reply.

A gateway may answer a request itself before sending it anywhere. Such an answer arrives while the request's half is still
waiting, and is passed on like any other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    BodySendMode,
    CommonResponse,
    HeaderMutation,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from kvatlas_router.gateway.ext_proc.messages import (
    answer_pieces,
    first_value,
    headers_only,
    read_headers,
    read_served,
    read_subset,
    read_upstream,
    request_pieces,
    set_destination,
    set_header,
)
from kvatlas_router.gateway.picker import Destination, RequestHead
from kvatlas_router.proxy.headers import RawHeaders


class ResponseMode(StrEnum):
    """How much of an answer passes through the picker.

    `whole`: everything that the gateway sends. `headers`: only the headers, if the gateway lets the picker choose. `none`: the
    picker closes its side of the stream once it has sent the request back, unless the gateway sends answers in full duplex.
    """

    WHOLE = "whole"
    HEADERS = "headers"
    NONE = "none"


class OutOfOrder(InvalidValue):
    """The gateway sent a message that is invalid at this point of its stream."""


@dataclass(frozen=True, slots=True)
class AskDestination:
    """The request needs a destination; call `forward` next, or end the stream with a refusal.

    `body=None`: the body was not waited for. `too_long`: refuse the request, because an engine must not get a body that has
    not been read here.
    """

    head: RequestHead
    body: bytes | None
    too_long: bool = False


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The answer's headers arrived; call `pass_head` next. `served`: the endpoint that answered, if the gateway names it.
    `upstream`: the same, taken from a standard Envoy attribute. `over`: no body follows."""

    status: int
    headers: RawHeaders
    served: str | None
    upstream: str | None
    over: bool


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of the answer arrived; call `pass_part` next. `over`: it is the last part."""

    body: bytes
    over: bool
    trailers: bool = False


Event = AskDestination | AnswerHead | AnswerPart


class _Phase(Enum):
    """The phase of a half."""

    HEADERS = auto()
    """Nothing has arrived yet."""
    WAITING = auto()
    """Request only: arriving parts are kept until `forward` answers them."""
    PASSING = auto()
    """Arriving parts are sent back immediately."""
    OVER = auto()


@dataclass(slots=True)
class StreamState:
    """`wants_body`: true if the decision needs the request's body. `most_body_bytes`: the longest body allowed.
    `response_mode`: as configured. `request_mode`, `answer_mode`: how the gateway sends bodies."""

    wants_body: Callable[[RequestHead], bool]
    response_mode: ResponseMode = ResponseMode.WHOLE
    most_body_bytes: int = 64 << 20
    request_mode: BodySendMode = NONE
    answer_mode: BodySendMode = NONE
    _request: _Phase = _Phase.HEADERS
    _answer: _Phase = _Phase.HEADERS
    _head: RequestHead | None = None
    _kept: list[bytes] = field(default_factory=list)
    _kept_bytes: int = 0
    _kept_ends: bool = False
    _trailers_kept: bool = False
    _body_was_asked: bool = False

    @property
    def request_over(self) -> bool:
        """True if the whole request has been sent back."""
        return self._request is _Phase.OVER or (self._request is _Phase.PASSING and self.request_mode == NONE)

    @property
    def answer_over(self) -> bool:
        """True if every part of the answer that the gateway sends has been sent back."""
        return self._answer is _Phase.OVER

    @property
    def answer_begun(self) -> bool:
        return self._answer is not _Phase.HEADERS

    @property
    def can_change_answer(self) -> bool:
        """True if parts of the answer's body may be changed or dropped."""
        return self.answer_mode == FULL_DUPLEX_STREAMED

    def receive(self, message: ProcessingRequest) -> Event | Iterator[ProcessingResponse]:
        """Take a message. Returns the event for the caller to handle, or the replies to send. Raises OutOfOrder."""
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message)
            case "request_body":
                return self._request_body(message.request_body)
            case "request_trailers":
                return self._request_trailers()
            case "response_headers":
                return self._answer_headers(message)
            case "response_body":
                return self._answer_body(message.response_body)
            case "response_trailers":
                return self._answer_trailers()
            case None:
                return iter(())  # a kind of message that is newer than this code
            case other:
                raise OutOfOrder(f"unknown message {other}")

    # ------------------------------------------------------------ request

    def _request_headers(self, message: ProcessingRequest) -> Event | Iterator[ProcessingResponse]:
        if self._request is not _Phase.HEADERS:
            raise OutOfOrder("request headers came twice")
        protocol = message.protocol_config
        self.request_mode, self.answer_mode = protocol.request_body_mode, protocol.response_body_mode
        over = message.request_headers.end_of_stream
        headers = read_headers(message.request_headers.headers)
        self._head = RequestHead(headers, read_subset(message), message.metadata_context.filter_metadata)
        self._request = _Phase.WAITING
        self._kept_ends = over
        if over or self.request_mode not in (BUFFERED, FULL_DUPLEX_STREAMED) or not self.wants_body(self._head):
            return AskDestination(self._head, b"" if over else None)
        self._body_was_asked = True
        return iter((self._headers_reply(),) if self.request_mode == BUFFERED else ())

    def _headers_reply(self) -> ProcessingResponse:
        """The reply to the request's headers without a destination. The gateway then sends the body."""
        response = ProcessingResponse()
        response.request_headers.response.SetInParent()
        self._override_mode(response)
        return response

    def _override_mode(self, response: ProcessingResponse) -> None:
        if self.response_mode is ResponseMode.HEADERS and self.answer_mode != NONE:
            response.mode_override.CopyFrom(headers_only(self.request_mode))

    def _request_body(self, part: HttpBody) -> Event | Iterator[ProcessingResponse]:
        if self._request is _Phase.PASSING:
            if part.end_of_stream:
                self._request = _Phase.OVER
            if self.request_mode == FULL_DUPLEX_STREAMED:
                return request_pieces(part.body, last=part.end_of_stream)
            response = ProcessingResponse()
            response.request_body.response.SetInParent()
            return iter((response,))
        if self._request is not _Phase.WAITING or self._head is None or self._kept_ends:
            raise OutOfOrder("a piece of the request's body came before its headers, or after its end")
        self._kept.append(part.body)
        self._kept_bytes += len(part.body)
        self._kept_ends = part.end_of_stream
        if self._kept_bytes > self.most_body_bytes:
            return AskDestination(self._head, None, too_long=True)
        if self._kept_ends or self.request_mode == BUFFERED:
            return AskDestination(self._head, b"".join(self._kept))
        return iter(())

    def _request_trailers(self) -> Event | Iterator[ProcessingResponse]:
        if self._request is _Phase.PASSING:
            self._request = _Phase.OVER
            return iter((_trailers_reply(),))
        if self._request is not _Phase.WAITING or self._head is None or self._trailers_kept or self._kept_ends:
            raise OutOfOrder("request trailers came before the headers, or after the request's end")
        self._trailers_kept = True
        return AskDestination(self._head, b"".join(self._kept))

    def forward(self, destination: Destination) -> Iterator[ProcessingResponse]:
        """The replies that send the request on: its headers with the destination, and the body so far.

        The body may be replaced (`destination.body`) if the decision was given it.
        """
        self._request = _Phase.OVER if self._kept_ends or self._trailers_kept else _Phase.PASSING
        headers = dict(destination.headers)
        changed = destination.body is not None
        body = b"".join(self._kept) if destination.body is None else destination.body
        if changed and self._head is not None and self._head.first(b"content-length") is not None:
            headers["content-length"] = str(len(body))
        response = ProcessingResponse()
        if self._body_was_asked and self.request_mode == BUFFERED:  # the headers already got their reply
            self._request = _Phase.OVER
            common = response.request_body.response
            if changed:
                common.body_mutation.body = body
            _send_to(response, common, destination, headers)
            yield response
        else:
            _send_to(response, response.request_headers.response, destination, headers)
            self._override_mode(response)
            yield response
            if self.request_mode == FULL_DUPLEX_STREAMED and (self._kept or body):
                yield from request_pieces(body, last=self._kept_ends)
        if self._trailers_kept:
            yield _trailers_reply()
        self._kept.clear()

    # ------------------------------------------------------------ answer

    def _answer_headers(self, message: ProcessingRequest) -> AnswerHead:
        if self._answer is not _Phase.HEADERS:
            raise OutOfOrder("answer headers came twice")
        over = message.response_headers.end_of_stream
        self._answer = _Phase.OVER if over else _Phase.PASSING
        headers = read_headers(message.response_headers.headers)
        text = first_value(headers, b":status") or ""
        status = int(text) if text.isascii() and text.isdigit() and len(text) == 3 else 0
        return AnswerHead(status, headers, read_served(message), read_upstream(message), over)

    def pass_head(self, headers: Mapping[str, str], *, changes_length: bool = False) -> ProcessingResponse:
        """The reply to an answer's headers. `headers` are added. `changes_length`: the body's length will change."""
        response = ProcessingResponse()
        response.response_headers.response.SetInParent()
        mutation = response.response_headers.response.header_mutation
        _set_headers(mutation, headers)
        if changes_length:
            mutation.remove_headers.append("content-length")
        return response

    def _answer_body(self, part: HttpBody) -> AnswerPart:
        if self._answer is not _Phase.PASSING:
            raise OutOfOrder("a piece of the answer's body came before its headers, or after its end")
        if part.end_of_stream:
            self._answer = _Phase.OVER
        return AnswerPart(part.body, part.end_of_stream)

    def _answer_trailers(self) -> AnswerPart:
        if self._answer is not _Phase.PASSING:
            raise OutOfOrder("answer trailers came before the headers, or after the answer's end")
        self._answer = _Phase.OVER
        return AnswerPart(b"", over=True, trailers=True)

    def pass_part(self, part: AnswerPart, body: bytes) -> Iterator[ProcessingResponse]:
        """The replies to a part of an answer. If `can_change_answer`, the client gets `body` instead of the part's own."""
        if self.can_change_answer:
            yield from answer_pieces(body, last=part.over and not part.trailers)
        elif not part.trailers:
            response = ProcessingResponse()
            response.response_body.response.SetInParent()
            yield response
        if part.trailers:
            response = ProcessingResponse()
            response.response_trailers.SetInParent()
            yield response


def _send_to(
    response: ProcessingResponse, common: CommonResponse, destination: Destination, headers: Mapping[str, str]
) -> None:
    common.clear_route_cache = True
    set_destination(response, common.header_mutation, destination.endpoints)
    _set_headers(common.header_mutation, headers)
    common.header_mutation.remove_headers.extend(destination.withdrawn)


def _set_headers(mutation: HeaderMutation, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        set_header(mutation, name, value)


def _trailers_reply() -> ProcessingResponse:
    response = ProcessingResponse()
    response.request_trailers.SetInParent()
    return response
