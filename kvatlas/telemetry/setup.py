"""Switches on OpenTelemetry's SDK in kvatlas' own processes, according to the standard OTEL_* variables.

A signal is on if an exporter is named (OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER; not `none`) or an OTLP endpoint is set
(OTEL_EXPORTER_OTLP_ENDPOINT, or that of the signal). OTEL_SDK_DISABLED=true overrides everything. The SDK itself reads
samplers, intervals, headers, resource attributes and so on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from os import environ as process_environ
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry import metrics, trace

from kvatlas.errors import SettingsError
from kvatlas.version import own_version

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

SHUTDOWN_S = 2.0

Signal = Literal["traces", "metrics"]
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_HISTOGRAMS = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


@dataclass(slots=True)
class Telemetry:
    """The providers that were switched on; None for a signal that stays off."""

    tracer_provider: "TracerProvider | None" = None
    meter_provider: "MeterProvider | None" = None

    @property
    def enabled(self) -> bool:
        return self.tracer_provider is not None or self.meter_provider is not None

    def shutdown(self, deadline_s: float = SHUTDOWN_S) -> None:
        """Export the remaining data. Whatever the collector has not accepted by the deadline is lost, so that the exit is not
        delayed."""
        shutdowns: list[Callable[[], None]] = []
        if self.tracer_provider is not None:
            shutdowns.append(self.tracer_provider.shutdown)
        if self.meter_provider is not None:
            shutdowns.append(self.meter_provider.shutdown)
        threads = [Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
        for thread in threads:
            thread.start()
        until_s = monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, until_s - monotonic()))


def requested_exporters(environ: Mapping[str, str] | None = None) -> dict[Signal, list[str]]:
    """The exporters that the OTEL_* variables request for each signal; there is no entry for a signal that is off."""
    env = process_environ if environ is None else environ
    if _is_disabled(env):
        return {}
    requested: dict[Signal, list[str]] = {}
    signals: tuple[Signal, ...] = ("traces", "metrics")
    for signal in signals:
        named = env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
        if not named and (env.get(_ENDPOINT) or env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")):
            named = "otlp"
        exporters = [name for name in (part.strip() for part in named.split(",")) if name and name.lower() != "none"]
        if exporters:
            requested[signal] = exporters
    return requested


def setup_telemetry(
    component: str, environ: Mapping[str, str] | None = None, *, metrics_page: bool = False
) -> Telemetry:
    """Switch on what the environment requests. If there is no OTEL_* variable, nothing is imported and nothing runs.

    `component` names the process: its `service.name` is `kvatlas-<component>` unless the environment sets one. `metrics_page`:
    the process serves `read_metrics_page`, so its metrics are on unless OTEL_SDK_DISABLED is true. Raises SettingsError if an
    exporter or the SDK is not installed, or if the providers have already been set.
    """
    env = process_environ if environ is None else environ
    requested = requested_exporters(env)
    with_page = metrics_page and not _is_disabled(env)
    if not requested and not with_page:
        return Telemetry()
    exporters = {
        signal: [_load_exporter(signal, name, env)() for name in names] for signal, names in requested.items()
    }  # before any provider is set: a wrong name must not leave half of them running
    if with_page and "prometheus" not in requested.get("metrics", ()):  # that exporter's reader fills the same page
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        exporters.setdefault("metrics", []).append(PrometheusMetricReader())
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from kvatlas.telemetry.histogram_export import add_distributions
    from kvatlas.telemetry.root_sampler import decide_roots_first

    attributes: dict[str, Any] = {"service.version": own_version()}
    if not env.get("OTEL_SERVICE_NAME") and "service.name=" not in env.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = f"kvatlas-{component}"
    resource = Resource.create(attributes)
    telemetry = Telemetry()
    if "traces" in exporters:
        telemetry.tracer_provider = decide_roots_first(TracerProvider(resource=resource, shutdown_on_exit=False))
        for exporter in exporters["traces"]:
            telemetry.tracer_provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(telemetry.tracer_provider)
    if "metrics" in exporters:
        readers = [
            exporter if isinstance(exporter, MetricReader) else PeriodicExportingMetricReader(exporter)
            for exporter in exporters["metrics"]
        ]
        telemetry.meter_provider = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(telemetry.meter_provider)
        explicit = env.get(_HISTOGRAMS, "").strip().lower() == "explicit_bucket_histogram"
        for reader in readers:  # Prometheus' text format only has explicit bounds
            pushes = isinstance(reader, PeriodicExportingMetricReader)
            add_distributions(reader, resource, exponential=pushes and not explicit)
            if not pushes and hasattr(reader, "_collector"):
                from kvatlas.telemetry.prometheus_exemplars import with_exemplars

                collector: Any = reader._collector
                collector.collect = with_exemplars(collector.collect)
    return telemetry


def read_metrics_page(accept: str = "") -> tuple[bytes, str]:
    """The metrics of the process in one of Prometheus' text formats that the client accepts, and the content type. Takes
    milliseconds, so don't call it in an event loop."""
    from prometheus_client import REGISTRY
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type


def _is_disabled(env: Mapping[str, str]) -> bool:
    return env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _load_exporter(signal: Signal, name: str, env: Mapping[str, str]) -> Any:
    """Load the exporter (or metric reader) class that an installed distribution registers under `name`."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    registered = name
    if name == "otlp":
        variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"
        variable = variable if env.get(variable) else _PROTOCOL
        protocol = env.get(variable, "http/protobuf").strip()
        if protocol not in _PROTOCOLS:
            raise SettingsError(f"{variable} is {protocol!r}; expected http/protobuf or grpc")
        registered = _PROTOCOLS[protocol]
    found = entry_points(group=f"opentelemetry_{signal}_exporter", name=registered)
    if not found:
        raise SettingsError(
            f"{variable} asks for the {signal} exporter {registered!r}, which is not installed; "
            "for otlp: pip install opentelemetry-exporter-otlp-proto-http"
        )
    return next(iter(found)).load()
