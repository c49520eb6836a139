"""The effects of the OTEL_* variables. Providers are global to a process, so a real set-up runs in a child process."""

import os
import re
import subprocess
import sys

import pytest

from kvatlas.errors import SettingsError
from kvatlas.telemetry import requested_exporters, setup_telemetry


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "NONE"}, {}),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, {"traces": ["otlp"]}),
        ({"OTEL_METRICS_EXPORTER": "console, otlp"}, {"metrics": ["console", "otlp"]}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, {"traces": ["otlp"], "metrics": ["otlp"]}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, {"traces": ["otlp"]}),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"},
            {"traces": ["otlp"]},
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, {}),
    ],
)
def test_the_variables_select_the_exporters_of_each_signal(
    environ: dict[str, str], expected: dict[str, list[str]]
) -> None:
    assert requested_exporters(environ) == expected


def test_nothing_is_imported_while_telemetry_is_off() -> None:
    code = (
        "import sys, kvatlas.telemetry as t\n"
        "assert not t.setup_telemetry('x', {}).enabled and not t.tracing_enabled()\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    assert run_child(code, {}).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkins"},
            (
                "OTEL_TRACES_EXPORTER asks for the traces exporter 'zipkins', which is not installed; "
                "for otlp: pip install opentelemetry-exporter-otlp-proto-http"
            ),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; expected http/protobuf or grpc",
        ),
    ],
)
def test_a_wrong_variable_is_reported_in_one_line(environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingsError) as error:
        setup_telemetry("x", environ)
    assert str(error.value) == line


def test_spans_and_metrics_are_exported_with_the_service_name() -> None:
    code = (
        "import kvatlas.telemetry as t\n"
        "telemetry = t.setup_telemetry('indexer')\n"
        "assert telemetry.enabled and t.tracing_enabled()\n"
        "with t.flush_span('w1', messages=1): assert t.inject_headers()\n"
        "telemetry.shutdown()\n"
    )
    out = run_child(code, {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "console"}).stdout
    assert '"service.name": "kvatlas-indexer"' in out
    assert '"name": "send kvatlas.events.{partition}.{worker}"' in out


def test_the_environment_may_set_the_service_name() -> None:
    code = (
        "import kvatlas.telemetry as t\n"
        "telemetry = t.setup_telemetry('indexer')\n"
        "print(telemetry.tracer_provider.resource.attributes['service.name'])\n"
        "telemetry.shutdown()\n"
    )
    for variables in ({"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}):
        assert run_child(code, {"OTEL_TRACES_EXPORTER": "console", **variables}).stdout.startswith("mine")


@pytest.mark.parametrize("exporter", ["none", "console", "prometheus"])
def test_a_page_has_each_metric_once_whatever_else_is_exported(exporter: str) -> None:
    code = (
        "import kvatlas.telemetry as t\n"
        "from router_client.counters import RouterCounters\n"
        "telemetry = t.setup_telemetry('router', metrics_page=True)\n"
        "with t.export_metrics('router', RouterCounters(routed=7)): page, kind = t.read_metrics_page()\n"
        "telemetry.shutdown()\n"
        "print(kind, page.decode(), sep='\\n')"
    )
    port = {"OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
    out = run_child(code, {"OTEL_METRICS_EXPORTER": exporter, **port}).stdout
    routed = [
        line for line in out.splitlines() if re.match(r'kvatlas_router_decisions_total{.*outcome="routed".*} ', line)
    ]
    assert out.startswith("text/plain") and len(routed) == 1 and routed[0].endswith(" 7.0")


def run_child(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done
