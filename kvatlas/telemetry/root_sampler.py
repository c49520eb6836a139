"""Decides whether a new trace is sampled before it has a span, because an unsampled OpenTelemetry span costs twice as much as
the decision.

This module imports the SDK; spans.py reaches it through a tracer's `sampler`.
"""

import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class _Decided(threading.local):
    """The trace id of the root span that this thread begins next, and the decision about it."""

    root: tuple[int, SamplingResult] | None = None


class RootSampler(Sampler, RandomIdGenerator):
    """The sampler and the source of ids of a provider. It asks the provider's own sampler once for each root span, either in
    `drops_root` or for the span itself; the decision is the same."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._decided = _Decided()

    def drops_root(self, name: str, kind: SpanKind) -> bool:
        """True if a span without attributes and links that begins now would have no parent and would be neither sampled nor
        recorded. If this returns False, that span must be the next one of this thread."""
        if trace.get_current_span().get_span_context().is_valid:
            return False
        trace_id = super().generate_trace_id()
        result = self._sampler.should_sample(None, trace_id, name, kind, None, ())
        if result.decision is Decision.DROP:
            return True
        self._decided.root = trace_id, result
        return False

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        decided, self._decided.root = self._decided.root, None
        if decided is not None and decided[0] == trace_id:
            return decided[1]
        return self._sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return self._sampler.get_description()

    def generate_trace_id(self) -> int:
        decided = self._decided.root
        return super().generate_trace_id() if decided is None else decided[0]


def decide_roots_first(provider: TracerProvider) -> TracerProvider:
    """Make the provider's tracers use a RootSampler."""
    provider.sampler = provider.id_generator = RootSampler(provider.sampler)
    return provider
