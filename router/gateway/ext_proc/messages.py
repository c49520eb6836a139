"""Typed reading and building of Envoy's external processing messages: headers, metadata, pieces of bodies.

Names of headers and metadata follow the endpoint picker protocol 1.0.0 (Gateway API Inference Extension).
"""

from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.struct_pb2 import Struct

from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import (
    NONE,
    OVERWRITE_IF_EXISTS_OR_ADD,
    SEND,
    BodySendMode,
    HeaderMap,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from kvatlas_router.proxy.headers import RawHeaders

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key for the endpoints to use, in order."""
MOST_PIECE_BYTES = 62_000
"""Size of the largest piece of a body that is sent back. It is below Envoy's smallest usual message limit, 64 KiB."""

_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_EXT_PROC_ATTRIBUTES = "envoy.filters.http.ext_proc"
_UPSTREAM_ADDRESS = "upstream.address"


# ---------------------------------------------------------------- read


def read_headers(headers: HeaderMap) -> RawHeaders:
    """The headers, with names in lower case. Envoy sets `raw_value`, other gateways `value`."""
    return [(each.key.lower().encode(), each.raw_value or each.value.encode()) for each in headers.headers]


def first_value(headers: RawHeaders, name: bytes) -> str | None:
    """The header's first value that is not empty."""
    return next((value.decode("latin-1") for each, value in headers if each == name and value), None)


def read_subset(message: ProcessingRequest) -> tuple[str, ...] | None:
    """The endpoints to which the gateway restricts the choice, in the gateway's order; None: no restriction.

    The value is a list or comma-separated text. Any other type gives an empty subset, because a restriction was intended.
    """
    metadata = message.metadata_context.filter_metadata
    if _SUBSET_HINT not in metadata or _SUBSET not in metadata[_SUBSET_HINT].fields:
        return None
    value = metadata[_SUBSET_HINT].fields[_SUBSET]
    texts = [value.string_value]
    if value.WhichOneof("kind") == "list_value":
        texts = [each.string_value for each in value.list_value.values]
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def metadata_text(metadata: Mapping[str, Struct], namespace: str, key: str) -> str | None:
    """The text under a key in a namespace of dynamic metadata, or None. Dots in the key lead into nested structures."""
    if namespace not in metadata:
        return None
    *outer, last = key.split(".")
    fields = metadata[namespace].fields
    for name in outer:
        if name not in fields or fields[name].WhichOneof("kind") != "struct_value":
            return None
        fields = fields[name].struct_value.fields
    if last not in fields or fields[last].WhichOneof("kind") != "string_value":
        return None
    return fields[last].string_value


def read_served(message: ProcessingRequest) -> str | None:
    """The endpoint that answered, if the gateway names it along with the answer's headers; otherwise None."""
    metadata = message.metadata_context.filter_metadata
    return _text(metadata[_LB], _SERVED) if _LB in metadata else None


def read_upstream(message: ProcessingRequest) -> str | None:
    """The endpoint that answered, from Envoy's attribute if the filter sends it (`response_attributes: [upstream.address]`)."""
    attributes = message.attributes
    return _text(attributes[_EXT_PROC_ATTRIBUTES], _UPSTREAM_ADDRESS) if _EXT_PROC_ATTRIBUTES in attributes else None


def _text(struct: Struct, key: str) -> str | None:
    return (struct.fields[key].string_value or None) if key in struct.fields else None


# ---------------------------------------------------------------- build


def set_destination(response: ProcessingResponse, mutation: HeaderMutation, destinations: Sequence[str]) -> None:
    """Set the endpoints to use, both in the header and in the metadata, since gateways may read either."""
    value = ",".join(destinations)
    set_header(mutation, DESTINATION, value)
    response.dynamic_metadata.update({_LB: {DESTINATION: value}})


def set_header(mutation: HeaderMutation, name: str, value: str) -> None:
    """Add or replace a header."""
    header = HeaderValue(key=name, raw_value=value.encode())
    mutation.set_headers.append(HeaderValueOption(header=header, append_action=OVERWRITE_IF_EXISTS_OR_ADD))


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> ProcessingResponse:
    """The picker's own answer in place of an engine's."""
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = "kvatlas"
    for name, value in headers.items():
        set_header(immediate.headers, name, value)
    return response


def request_pieces(body: bytes, *, last: bool) -> Iterator[ProcessingResponse]:
    """Messages that send part of a request's body back in full duplex. `last`: the body ends with this part."""
    for piece, is_last in _pieces(body, last=last):
        response = ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, is_last
        yield response


def answer_pieces(body: bytes, *, last: bool) -> Iterator[ProcessingResponse]:
    """Like `request_pieces`, for an answer's body."""
    for piece, is_last in _pieces(body, last=last):
        response = ProcessingResponse()
        streamed = response.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, is_last
        yield response


def _pieces(body: bytes, *, last: bool) -> Iterator[tuple[bytes, bool]]:
    if len(body) <= MOST_PIECE_BYTES:
        if body or last:
            yield body, last
        return
    for at in range(0, len(body), MOST_PIECE_BYTES):
        yield body[at : at + MOST_PIECE_BYTES], last and at + MOST_PIECE_BYTES >= len(body)


def headers_only(request_body: BodySendMode) -> ProcessingMode:
    """The mode that sends an answer's headers and trailers, not its body. Because trailers are sent, a stream lasts as long as
    the answer.

    Envoy heeds it only if the filter has `allow_mode_override`, and not in full duplex.
    """
    return ProcessingMode(
        request_header_mode=SEND,
        response_header_mode=SEND,
        request_body_mode=request_body,
        response_body_mode=NONE,
        response_trailer_mode=SEND,
    )
