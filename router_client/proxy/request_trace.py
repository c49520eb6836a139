"""The caller's trace: continued by a span of the proxy, whose context goes on to the engine."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvatlas.telemetry import tracing_enabled

_PROPAGATOR = TraceContextTextMapPropagator()
_NAMES = (b"traceparent", b"tracestate")


@contextmanager
def request_span(path: str, headers: Iterable[tuple[bytes, bytes]], *, method: str = "POST") -> Iterator[Span]:
    """The SERVER span of one request, a child of the caller's; current inside the block. No span while tracing is off."""
    if not tracing_enabled():
        yield INVALID_SPAN
        return
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _NAMES}
    with trace.get_tracer("kvatlas").start_as_current_span(
        f"{method} {path}",
        context=_PROPAGATOR.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "url.path": path},
    ) as span:
        yield span


def trace_headers() -> Mapping[str, str]:
    """Headers that continue the current span; none while tracing is off: then the caller's own are forwarded."""
    headers: dict[str, str] = {}
    if tracing_enabled():
        _PROPAGATOR.inject(headers)
    return headers


def describe_try(span: Span, *, worker_id: str, attempt: int, status: int | None, note: str = "") -> None:
    """One try on one engine, as an event of the request's span."""
    if span.is_recording():
        attributes: dict[str, str | int] = {
            "kvatlas.worker": worker_id,
            "kvatlas.attempt": attempt,
            "kvatlas.note": note,
        }
        if status is not None:
            attributes["http.response.status_code"] = status
        span.add_event("try", attributes)


def describe_answer(span: Span, status: int, worker_id: str | None) -> None:
    """The answer that the client gets, on the request's span."""
    if not span.is_recording():
        return
    span.set_attribute("http.response.status_code", status)
    if worker_id is not None:
        span.set_attribute("kvatlas.worker", worker_id)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
