"""Spans from engine batch to applied batch to decision, and the trace context that links them.

    send kvatlas.events.{partition}.{worker}      PRODUCER  a batch that a publisher flushes, or a snapshot; a snapshot links to
                                                            the request for it
    request snapshot                              PRODUCER  an indexer's request for a snapshot of a worker in doubt
    process kvatlas.events.{partition}.{worker}   CONSUMER  a batch with a traced message that an indexer applies;
                                                            child of the first such send, links to all of them
    route | route_pd | rank | overlap kvatlas     INTERNAL  a call of the router client; links to the last applied batch of the
                                                            picked worker that links to a send
    FCALL kvatlas_book, FCALL_RO ...              CLIENT    a call to the store, inside a sampled span only

A span costs about 15 us, and 64 links another 100 us; that is why there is one span per batch, with at most MAX_LINKS links.
OpenTelemetry has no conventions for NATS, so names, kinds and attributes follow its general messaging conventions. The context
travels as W3C `traceparent` (and `tracestate`) in NATS headers; the index passes it on to routers in the fleet record.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from opentelemetry import context, trace
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_LINKS = 32
DESTINATION_TEMPLATE = "kvatlas.events.{partition}.{worker}"
SEND = f"send {DESTINATION_TEMPLATE}"
PROCESS = f"process {DESTINATION_TEMPLATE}"
WORKER = "kvatlas.worker"
INCARNATION = "kvatlas.incarnation"
"""As text, because not every trace store has 64-bit integers."""

_TRACEPARENT = "traceparent"
_OFF: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)
_PROPAGATOR = TraceContextTextMapPropagator()
_MESSAGING: dict[str, Any] = {
    "messaging.system": "nats",
    "messaging.destination.name": "KVATLAS_EVENTS",
    "messaging.destination.template": DESTINATION_TEMPLATE,
}
_SENDING: dict[str, Any] = {
    **_MESSAGING,
    "messaging.operation.name": "send",
    "messaging.operation.type": "send",
}


def tracing_enabled() -> bool:
    """True if this process has a tracer provider. This is cheap, so it is checked first."""
    # get_tracer_provider checks this first, and then the environment, which takes ten times as long
    return trace._TRACER_PROVIDER is not None


def sampled_context() -> SpanContext | None:
    """The context of the current span, for the exemplar of a value; None while tracing is off or no sampled span is current."""
    if not tracing_enabled():
        return None
    current = trace.get_current_span()
    if current is INVALID_SPAN:
        return None
    named = current.get_span_context()
    return named if named.trace_flags.sampled else None


def inject_headers() -> dict[str, str] | None:
    """The context of the current span, as NATS headers; None while tracing is off or no sampled span is current."""
    if sampled_context() is None:
        return None
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers)
    return headers or None


def current_traceparent() -> str | None:
    """The W3C traceparent of the current span, for a fleet record; None if `inject_headers` returns None."""
    headers = inject_headers()
    return headers[_TRACEPARENT] if headers else None


def extract_link(headers: Mapping[str, str] | None) -> Link | None:
    """A link to the span whose context the headers carry; None if the context is missing or malformed."""
    if not headers or _TRACEPARENT not in headers:
        return None
    named = trace.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    return Link(named) if named.is_valid else None


def link_of(traceparent: str | None) -> Link | None:
    """A link to the span in a W3C traceparent; None if the traceparent is missing or malformed."""
    return extract_link({_TRACEPARENT: traceparent}) if traceparent else None


class CurrentSpan(AbstractContextManager[Span]):
    """Makes a span the current one for a block and ends it afterwards; records an error that leaves the block. Does the same as
    OpenTelemetry's `use_span`, but takes half the time."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._token = context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context.detach(self._token)
        if isinstance(error, Exception) and self._span.is_recording():
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()


def _without_children(span: Span) -> AbstractContextManager[Span]:
    """Make the span the current one if it is sampled; otherwise its block needs no current span."""
    return CurrentSpan(span) if span.is_recording() else nullcontext(span)


class LinkCollector:
    """Collects the links of one batch: each span once, at most MAX_LINKS links, and no parsing beyond that number."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, headers: Mapping[str, str] | None) -> None:
        """Add the span in a message's headers, if there is one."""
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
    worker_id: str,
    *,
    incarnation: int = 0,
    messages: int,
    events: int = 0,
    blocks: int = 0,
    started_ns: int | None = None,
) -> AbstractContextManager[Span]:
    """The PRODUCER span of one flushed batch. It is the current span inside the block, so `inject_headers` returns its context.

    `started_ns`: when the first engine batch in it was received (nanoseconds since 1970), so that the span includes the wait.
    """
    if not tracing_enabled():
        return _OFF
    tracing = _tracing()
    if tracing.drops_root is not None and tracing.drops_root(SEND, SpanKind.PRODUCER):
        return _OFF
    span = tracing.tracer.start_span(SEND, kind=SpanKind.PRODUCER, start_time=started_ns)
    if not span.is_recording():
        return nullcontext(span)
    span.set_attributes(
        {
            **_SENDING,
            "messaging.batch.message_count": messages,
            WORKER: worker_id,
            INCARNATION: str(incarnation),
            "kvatlas.events": events,
            "kvatlas.blocks": blocks,
        }
    )
    return CurrentSpan(span)


def snapshot_span(
    worker_id: str, *, incarnation: int, blocks: int, reason: str, request: Mapping[str, str] | None = None
) -> AbstractContextManager[Span]:
    """The PRODUCER span of a snapshot, which begins an incarnation; see `flush_span`.

    `reason`: why it begins. `request`: the headers of the request for the snapshot, if there was one; the span links to it.
    """
    if not tracing_enabled():
        return _OFF
    attributes = {
        **_SENDING,
        WORKER: worker_id,
        INCARNATION: str(incarnation),
        "kvatlas.blocks": blocks,
        "kvatlas.snapshot": reason,
    }
    link = extract_link(request)
    links = [link] if link is not None else []
    return _without_children(tracer().start_span(SEND, kind=SpanKind.PRODUCER, attributes=attributes, links=links))


def snapshot_request_span(worker_id: str, *, above: int, doubt: str) -> AbstractContextManager[Span]:
    """The PRODUCER span of an indexer's request for a snapshot; inside it, `inject_headers` returns its context.

    `above`: the incarnation in doubt. `doubt`: the reason.
    """
    if not tracing_enabled():
        return _OFF
    attributes = {
        "messaging.system": "nats",
        "messaging.destination.template": "kvatlas.control.{worker}",
        "messaging.operation.name": "request",
        "messaging.operation.type": "send",
        WORKER: worker_id,
        INCARNATION: str(above),
        "kvatlas.doubt": doubt,
    }
    return _without_children(tracer().start_span("request snapshot", kind=SpanKind.PRODUCER, attributes=attributes))


def apply_span(
    links: Iterable[Link] = (), *, shard: int | None = None, partitions: int = 1, messages: int = 0
) -> AbstractContextManager[Span]:
    """The CONSUMER span of one batch that an indexer applies to the index. Keeps the first MAX_LINKS links.

    The span is also a child of the first link: a batch is sampled if one of its messages is, and has no span if none is.
    `describe_batch` adds the workers of the messages.
    """
    kept = list(islice(links, MAX_LINKS))
    if not kept or not tracing_enabled():
        return _OFF
    parent = trace.set_span_in_context(NonRecordingSpan(kept[0].context))
    attributes = {
        **_MESSAGING,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": messages,
        "kvatlas.partitions": partitions,
    }
    if shard is not None:
        attributes["kvatlas.shard"] = shard
    return _without_children(
        tracer().start_span(PROCESS, context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=kept)
    )


def describe_batch(span: Span, workers: Mapping[tuple[str, int], int]) -> None:
    """Record how many messages of each (worker, incarnation) a batch contains.

    If there is a single worker, it becomes attributes; if there are several, each of the first MAX_LINKS becomes an event. A
    search for a worker or an incarnation finds both.
    """
    if len(workers) == 1:
        ((worker_id, incarnation),) = workers
        span.set_attributes({WORKER: worker_id, INCARNATION: str(incarnation)})
        return
    for (worker_id, incarnation), messages in list(workers.items())[:MAX_LINKS]:
        attributes: dict[str, Any] = {
            WORKER: worker_id,
            INCARNATION: str(incarnation),
            "kvatlas.messages": messages,
        }
        span.add_event("messages of a worker", attributes)


def store_span(
    operation: str, function: str, server: Mapping[str, Any], calls: int = 1
) -> AbstractContextManager[Span]:
    """The CLIENT span of calls to a store function that are sent together; made only inside a sampled span.

    `operation`: the command of Redis. `server`: attributes that identify the store.
    """
    if not tracing_enabled() or not trace.get_current_span().is_recording():
        return _OFF
    attributes = {
        "db.system.name": "redis",
        "db.operation.name": operation,
        "db.stored_procedure.name": function,
        **server,
    }
    if calls > 1:
        attributes["db.operation.batch.size"] = calls
    return CurrentSpan(tracer().start_span(f"{operation} {function}", kind=SpanKind.CLIENT, attributes=attributes))


def step_span(name: str) -> AbstractContextManager[Span]:
    """An INTERNAL span for one step of a larger span; made only inside a sampled span."""
    if not tracing_enabled() or not trace.get_current_span().is_recording():
        return _OFF
    return CurrentSpan(tracer().start_span(name))


def decision_span(operation: str, *, request_id: str | None = None, model_id: str = "") -> AbstractContextManager[Span]:
    """The span of one `route`, `rank` or `overlap`. It is a child of the caller's current span, if there is one; inside an
    unsampled span, none is made.

    `describe_decision` adds the outcome.
    """
    if not tracing_enabled():
        return _OFF
    caller = trace.get_current_span().get_span_context()
    if caller.is_valid and not caller.trace_flags.sampled:
        return _OFF
    attributes: dict[str, Any] = {"kvatlas.operation": operation, "kvatlas.model": model_id}
    if request_id is not None:
        attributes["kvatlas.request"] = request_id
    return CurrentSpan(tracer().start_span(f"{operation} kvatlas", kind=SpanKind.INTERNAL, attributes=attributes))


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
    """Record the outcome of a decision on its span. `applied`: the traceparents of the batches applied last
    (`FleetRecord.trace`)."""
    if not span.is_recording():
        return
    span.set_attribute("kvatlas.required_blocks", required_blocks)
    span.set_attribute("kvatlas.overlap_blocks", overlap_blocks)
    span.set_attribute("kvatlas.candidates", candidates)
    if worker_id is not None:
        span.set_attribute(WORKER, worker_id)
    if fallback is not None:
        span.set_attribute("kvatlas.fallback", fallback)
    for traceparent in [t for t in dict.fromkeys(applied) if t][:MAX_LINKS]:
        if link := link_of(traceparent):
            span.add_link(link.context)


class _Tracing(NamedTuple):
    """A provider, and the tracer that it gives to this package. `drops_root`: see `RootSampler`; None if the provider has
    none."""

    provider: TracerProvider
    tracer: Tracer
    drops_root: Callable[[str, SpanKind], bool] | None


_last: _Tracing | None = None


def tracer() -> Tracer:
    """The tracer of this package."""
    return _tracing().tracer


def _tracing() -> _Tracing:
    """The provider and the tracer, kept because the SDK takes a lock whenever a tracer is requested."""
    global _last
    provider = trace.get_tracer_provider()
    if _last is None or _last.provider is not provider:
        made = provider.get_tracer("kvatlas")
        _last = _Tracing(provider, made, getattr(getattr(made, "sampler", None), "drops_root", None))
    return _last
