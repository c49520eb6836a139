"""OpenTelemetry traces and metrics: off by default, on by the standard OTEL_* variables.

    setup.py          switches the SDK on in kvatlas' own processes (imports it only then)
    spans.py          spans and their context in NATS headers; costs next to nothing while off
    root_sampler.py   decides whether to sample a trace before it has a span
    instruments/      every metric's name, unit and description, and the plain integers behind it
    metric_export.py  reads those integers when an exporter asks

Importing this package only requires opentelemetry-api. A process that sets up OpenTelemetry itself (a router that embeds the
client) keeps its own providers and does not call `setup_telemetry`.
"""

from kvatlas.telemetry.instruments import INSTRUMENTS, Instrument
from kvatlas.telemetry.metric_export import MetricSource, export_metrics, metrics_enabled
from kvatlas.telemetry.setup import Telemetry, read_metrics_page, requested_exporters, setup_telemetry
from kvatlas.telemetry.spans import (
    MAX_LINKS,
    CurrentSpan,
    LinkCollector,
    apply_span,
    current_traceparent,
    decision_span,
    describe_batch,
    describe_decision,
    extract_link,
    flush_span,
    inject_headers,
    link_of,
    sampled_context,
    snapshot_request_span,
    snapshot_span,
    step_span,
    store_span,
    tracer,
    tracing_enabled,
)

__all__ = [
    "INSTRUMENTS",
    "MAX_LINKS",
    "CurrentSpan",
    "Instrument",
    "LinkCollector",
    "MetricSource",
    "Telemetry",
    "apply_span",
    "current_traceparent",
    "decision_span",
    "describe_batch",
    "describe_decision",
    "export_metrics",
    "extract_link",
    "flush_span",
    "inject_headers",
    "link_of",
    "metrics_enabled",
    "read_metrics_page",
    "requested_exporters",
    "sampled_context",
    "setup_telemetry",
    "snapshot_request_span",
    "snapshot_span",
    "step_span",
    "store_span",
    "tracer",
    "tracing_enabled",
]
