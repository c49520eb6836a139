"""Messages as a gateway sends them, for tests without one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    BodySendMode,
    HeaderMap,
    HeaderValue,
    ProcessingRequest,
    ProcessingResponse,
)

POST = {":method": "POST", ":path": "/v1/completions?a=b", "content-type": "application/json"}


def header_map(headers: Mapping[str, str], *, raw: bool = True) -> HeaderMap:
    values = [
        HeaderValue(key=key, raw_value=value.encode()) if raw else HeaderValue(key=key, value=value)
        for key, value in headers.items()
    ]
    return HeaderMap(headers=values)


def request_headers(
    headers: Mapping[str, str] = POST,
    *,
    over: bool = False,
    request_mode: BodySendMode = FULL_DUPLEX_STREAMED,
    answer_mode: BodySendMode = FULL_DUPLEX_STREAMED,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    raw: bool = True,
) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_headers.headers.CopyFrom(header_map(headers, raw=raw))
    message.request_headers.end_of_stream = over
    message.protocol_config.request_body_mode = request_mode
    message.protocol_config.response_body_mode = answer_mode
    for namespace, values in (metadata or {}).items():
        message.metadata_context.filter_metadata[namespace].update(values)
    return message


def request_body(body: bytes, *, over: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, over
    return message


def request_trailers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def answer_headers(
    status: str = "200", headers: Mapping[str, str] | None = None, *, over: bool = False
) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.headers.CopyFrom(header_map({":status": status, **(headers or {})}))
    message.response_headers.end_of_stream = over
    return message


def answer_body(body: bytes, *, over: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = body, over
    return message


def answer_trailers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_trailers.SetInParent()
    return message


def kinds(replies: Iterable[ProcessingResponse]) -> Sequence[str]:
    return [str(reply.WhichOneof("response")) for reply in replies]


def set_headers(reply: ProcessingResponse) -> Mapping[str, str]:
    """The headers that a reply of any kind sets."""
    part = getattr(reply, str(reply.WhichOneof("response")))
    mutation = part.headers if reply.HasField("immediate_response") else part.response.header_mutation
    assert all(option.header.raw_value and not option.header.value for option in mutation.set_headers)
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
