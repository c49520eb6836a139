"""A receiver of traces over OTLP/HTTP, like a collector, in memory and on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids are hexadecimal; an empty `parent` means none. `links`: ids of spans. `events`: attributes by name; the last
    event of each name counts."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    seconds: float
    links: frozenset[str]
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]


@dataclass(slots=True)
class TraceReceiver:
    """`url`: the endpoint for exporters. `payloads`: what was received, each with its path."""

    url: str
    payloads: list[tuple[str, bytes]] = field(default_factory=list)

    def has(self, path: str, *texts: str) -> bool:
        """True if a payload with all of these texts was received at this path."""
        return any(where == path and all(text.encode() in body for text in texts) for where, body in self.payloads)

    def spans(self) -> list[ReceivedSpan]:
        """All received spans, in order of arrival."""
        return [
            _received(_attributes(resource.resource.attributes)["service.name"], span)
            for path, body in list(self.payloads)
            if path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def running_receiver() -> Iterator[TraceReceiver]:
    """Listen on a free loopback port, in a separate thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.payloads.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: `payloads` is the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = TraceReceiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _received(service: str, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        service,
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        frozenset(link.span_id.hex() for link in span.links),
        _attributes(span.attributes),
        {event.name: _attributes(event.attributes) for event in span.events},
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        assert isinstance(pair, KeyValue)
        found[pair.key] = getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
    return found
