"""OpenTelemetry traces and metrics: off by default, on by the standard OTEL_* variables.

    setup.py        switches the SDK on in kvatlas' own processes (imports it only then)
    context.py      spans and their context in NATS headers; next to nothing while off
    instruments.py  every metric's name, unit and description, and which plain integers it is read from
    observation.py  reads them when an exporter asks

Importing this package needs opentelemetry-api alone. In a process that set up OpenTelemetry itself (a router that
embeds the client), its providers are used and `setup_telemetry` is not called.
"""

from kvatlas.telemetry.instruments import INSTRUMENTS, Instrument
from kvatlas.telemetry.metric_export import MetricSource, export_metrics, metrics_enabled
from kvatlas.telemetry.setup import Telemetry, requested_exporters, setup_telemetry
from kvatlas.telemetry.spans import (
    MAX_LINKS,
    LinkCollector,
    apply_span,
    current_traceparent,
    decision_span,
    describe_decision,
    extract_link,
    flush_span,
    inject_headers,
    link_of,
    tracing_enabled,
)

__all__ = [
    "INSTRUMENTS",
    "MAX_LINKS",
    "Instrument",
    "LinkCollector",
    "MetricSource",
    "Telemetry",
    "apply_span",
    "current_traceparent",
    "decision_span",
    "describe_decision",
    "export_metrics",
    "extract_link",
    "flush_span",
    "inject_headers",
    "link_of",
    "metrics_enabled",
    "requested_exporters",
    "setup_telemetry",
    "tracing_enabled",
]
