"""A request's trace. It continues the caller's trace with a span of the router and, for each attempt on an engine, a child
span whose context the engine gets."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvatlas.telemetry import CurrentSpan, tracer, tracing_enabled
from kvatlas_router.proxy.engine_call import INFERENCE
from kvatlas_router.upstream.engine_answer import EngineRequest
from router_client.learning.token_counts import Usage
from router_client.results import Choice

_OWN = {"/v1/models", "/kvatlas/route", "/kvatlas/select", "/kvatlas/done"}
_PROPAGATOR = TraceContextTextMapPropagator()
_NAMES = (b"traceparent", b"tracestate")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Operation names from OpenTelemetry's GenAI conventions, by path."""


def request_span(
    path: str, headers: Iterable[tuple[bytes, bytes]], *, method: str = "POST", model: str | None = None
) -> AbstractContextManager[Span]:
    """The SERVER span of one request, a child of the caller's span and the current span inside the block. There is no span
    while tracing is off."""
    if not tracing_enabled():
        return nullcontext(INVALID_SPAN)
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _NAMES}
    span = tracer().start_span(
        _span_name(method, path),
        context=_PROPAGATOR.extract(carrier) if carrier else None,
        kind=SpanKind.SERVER,
        attributes={**_http(method, path), **_gen_ai(path, model)},
    )
    return CurrentSpan(span)


def engine_span(request: EngineRequest, choice: Choice, model: str | None = None) -> Span:
    """The CLIENT span of one attempt on one engine, for the caller to end. It is a child of the current span but not current
    itself, because both engines of a pair may answer at once. No span outside a sampled one."""
    if not tracing_enabled() or not trace.get_current_span().is_recording():
        return INVALID_SPAN
    parts = urlsplit(choice.url)
    attributes: dict[str, str | int] = {
        **_http(request.method, request.path),
        **_gen_ai(request.path, model),
        "gen_ai.provider.name": choice.kind.value,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "kvatlas.worker": choice.worker_id,
        "kvatlas.role": choice.role.value,
    }
    name = _span_name(request.method, request.path)
    return tracer().start_span(name, kind=SpanKind.CLIENT, attributes=attributes)


def trace_headers(span: Span | None = None) -> Mapping[str, str]:
    """Headers that continue a span, or the current one. Empty while tracing is off: the caller's own headers are then
    forwarded."""
    headers: dict[str, str] = {}
    if tracing_enabled():
        recording = span is not None and span.is_recording()
        _PROPAGATOR.inject(headers, trace.set_span_in_context(span) if span is not None and recording else None)
    return headers


def describe_attempt(span: Span, *, worker_id: str, attempt: int, status: int | None, note: str = "") -> None:
    """Record an attempt on an engine, as an event of the request's span."""
    if span.is_recording():
        attributes: dict[str, str | int] = {
            "kvatlas.worker": worker_id,
            "kvatlas.attempt": attempt,
            "kvatlas.note": note,
        }
        if status is not None:
            attributes["http.response.status_code"] = status
        span.add_event("attempt", attributes)


def describe_first_token(span: Span, seconds: float) -> None:
    """Record the first token, as an event of the attempt's span. `seconds`: time since the client's request arrived."""
    if span.is_recording():
        span.add_event("first token", {"kvatlas.time_to_first_token": seconds})


def describe_usage(span: Span, usage: Usage | None) -> None:
    """Record the tokens that an engine reports on the attempt's span."""
    if usage is not None and span.is_recording():
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if usage.cached_tokens is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)


def describe_answer(span: Span, status: int, worker_id: str | None) -> None:
    """Record the answer to the client on the request's span."""
    if not span.is_recording():
        return
    span.set_attribute("http.response.status_code", status)
    if worker_id is not None:
        span.set_attribute("kvatlas.worker", worker_id)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _span_name(method: str, path: str) -> str:
    """The span's name. Unknown paths are left out, because they would create too many names."""
    return f"{method} {path}" if path in INFERENCE or path in _OWN else method


def _http(method: str, path: str) -> dict[str, str]:
    return {"http.request.method": method, "url.path": path}


def _gen_ai(path: str, model: str | None) -> dict[str, str]:
    found = {"gen_ai.operation.name": _OPERATIONS[path]} if path in _OPERATIONS else {}
    return found if model is None else {**found, "gen_ai.request.model": model}
