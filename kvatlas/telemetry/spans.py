"""Spans from engine batch to applied batch to decision, and the trace context that links them.

    send kvatlas.events.{partition}.{worker}      PRODUCER  one for each batch that a publisher flushes
    process kvatlas.events.{partition}.{worker}   CONSUMER  one for each batch that an indexer applies; links to sends
    route | rank | overlap                        INTERNAL  one for each call of the router client; links to the last
                                                            applied batch of the picked worker that links to a send

A span costs about 15 us and 64 links another 100 us, hence one span a batch and at most MAX_LINKS links. OpenTelemetry has
no conventions for NATS, so names, kinds and attributes follow its general messaging conventions. The context travels as W3C
`traceparent` (and `tracestate`) in NATS headers; the index passes it on to routers in the fleet record.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Link, ProxyTracerProvider, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_LINKS = 32
DESTINATION_TEMPLATE = "kvatlas.events.{partition}.{worker}"
SEND = f"send {DESTINATION_TEMPLATE}"
PROCESS = f"process {DESTINATION_TEMPLATE}"

_TRACEPARENT = "traceparent"
_OFF: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)
_PROPAGATOR = TraceContextTextMapPropagator()
_MESSAGING: dict[str, Any] = {
    "messaging.system": "nats",
    "messaging.destination.name": "KVATLAS_EVENTS",
    "messaging.destination.template": DESTINATION_TEMPLATE,
}


def tracing_enabled() -> bool:
    """True if this process has a tracer provider. Cheap: checked before anything else is done."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


def inject_headers() -> dict[str, str] | None:
    """The current span's context as NATS headers; None while tracing is off or no sampled span is current."""
    if not tracing_enabled() or not trace.get_current_span().get_span_context().trace_flags.sampled:
        return None
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers)
    return headers or None


def current_traceparent() -> str | None:
    """The current span's W3C traceparent, for a fleet record; None if `inject_headers` returns None."""
    headers = inject_headers()
    return headers[_TRACEPARENT] if headers else None


def extract_link(headers: Mapping[str, str] | None) -> Link | None:
    """A link to the span whose context the headers carry; None if it is missing or malformed."""
    if not headers or _TRACEPARENT not in headers:
        return None
    context = trace.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    return Link(context) if context.is_valid else None


def link_of(traceparent: str | None) -> Link | None:
    """A link to the span that a W3C traceparent names; None if it is missing or malformed."""
    return extract_link({_TRACEPARENT: traceparent}) if traceparent else None


class LinkCollector:
    """Collects the links of one batch: each span once, at most MAX_LINKS, and no parsing beyond that."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, headers: Mapping[str, str] | None) -> None:
        """Collect the span that a message's headers name, if any."""
        if not headers or len(self._links) >= MAX_LINKS:
            return
        traceparent = headers.get(_TRACEPARENT)
        if traceparent and traceparent not in self._links and (link := extract_link(headers)):
            self._links[traceparent] = link

    def take(self) -> list[Link]:
        """Remove and return the collected links."""
        links = list(self._links.values())
        self._links.clear()
        return links


def flush_span(
    worker_id: str, *, messages: int, events: int = 0, blocks: int = 0, started_ns: int | None = None
) -> AbstractContextManager[Span]:
    """The PRODUCER span of one flushed batch; it is the current span inside, so `inject_headers` returns its context.

    `started_ns`: when its first engine batch was received (nanoseconds since 1970), so that the wait shows too.
    """
    if not tracing_enabled():
        return _OFF
    attributes = {
        **_MESSAGING,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": messages,
        "kvatlas.worker": worker_id,
        "kvatlas.events": events,
        "kvatlas.blocks": blocks,
    }
    return _tracer().start_as_current_span(SEND, kind=SpanKind.PRODUCER, attributes=attributes, start_time=started_ns)


def apply_span(
    links: Iterable[Link] = (), *, shard: int | None = None, partitions: int = 1, messages: int = 0
) -> AbstractContextManager[Span]:
    """The CONSUMER span of one batch that an indexer applies to the index. Keeps the first MAX_LINKS links."""
    if not tracing_enabled():
        return _OFF
    attributes = {
        **_MESSAGING,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": messages,
        "kvatlas.partitions": partitions,
    }
    if shard is not None:
        attributes["kvatlas.shard"] = shard
    return _tracer().start_as_current_span(
        PROCESS, kind=SpanKind.CONSUMER, attributes=attributes, links=list(links)[:MAX_LINKS]
    )


def decision_span(operation: str, *, request_id: str | None = None, model_id: str = "") -> AbstractContextManager[Span]:
    """The span of one `route`, `rank` or `overlap`; a child of the caller's current span, if any.

    `describe_decision` adds the outcome.
    """
    if not tracing_enabled():
        return _OFF
    attributes: dict[str, Any] = {"kvatlas.operation": operation, "kvatlas.model": model_id}
    if request_id is not None:
        attributes["kvatlas.request"] = request_id
    return _tracer().start_as_current_span(f"{operation} kvatlas", kind=SpanKind.INTERNAL, attributes=attributes)


def describe_decision(
    span: Span,
    *,
    worker_id: str | None = None,
    required_blocks: int = 0,
    overlap_blocks: int = 0,
    candidates: int = 0,
    fallback: str | None = None,
    applied: Iterable[str | None] = (),
) -> None:
    """Record a decision's outcome on its span. `applied`: traceparents of last applied batches (`FleetRecord.trace`)."""
    if not span.is_recording():
        return
    span.set_attribute("kvatlas.required_blocks", required_blocks)
    span.set_attribute("kvatlas.overlap_blocks", overlap_blocks)
    span.set_attribute("kvatlas.candidates", candidates)
    if worker_id is not None:
        span.set_attribute("kvatlas.worker", worker_id)
    if fallback is not None:
        span.set_attribute("kvatlas.fallback", fallback)
    for traceparent in [t for t in dict.fromkeys(applied) if t][:MAX_LINKS]:
        if link := link_of(traceparent):
            span.add_link(link.context)


def _tracer() -> Tracer:
    return trace.get_tracer("kvatlas")
