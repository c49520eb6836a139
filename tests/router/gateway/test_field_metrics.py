"""The metrics that common dashboards read, on a Prometheus page."""

import pytest
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas_router.gateway.field_metrics import MOST_NAMES, OTHER, FieldMetrics, RequestLabels
from router_client.learning.token_counts import Usage

LABELS = {"model_name", "target_model_name", "fairness_id", "priority"}
EXPECTED = {
    "llm_d_epp_request_total": LABELS,
    "llm_d_epp_request_error_total": {*LABELS, "error_code"},
    "llm_d_epp_request_running": LABELS,
    "llm_d_epp_request_duration_seconds_count": LABELS,
    "llm_d_epp_request_ttft_seconds_count": {*LABELS, "streaming"},
    "llm_d_epp_request_input_tokens_sum": LABELS,
    "llm_d_epp_request_output_tokens_sum": LABELS,
    "llm_d_epp_request_cached_tokens_sum": LABELS,
    "llm_d_epp_scheduler_e2e_duration_seconds_count": set(),
    "llm_d_epp_ready_endpoints": {"name"},
}
"""Names and labels that llm-d-router 0.9 documents."""


def test_names_labels_and_values_are_those_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PrometheusMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    try:
        field = FieldMetrics("pool", lambda: 3)
        field.record_pick(0.001)
        for number in range(MOST_NAMES + 2):
            attributes = field.record_begin(RequestLabels(f"m{number}"))
        assert attributes["model_name"] == OTHER
        attributes = field.record_begin(RequestLabels("m1", "m2", "", 5))
        field.record_first_token(attributes, 0.2, streamed=True)
        field.record_end(attributes, 0.5, "", Usage(100, 7, 64))
        field.record_end(attributes, 0.5, "gone", None)
        field.record_refusal(503)
        page = generate_latest(REGISTRY).decode()
    finally:
        provider.shutdown()
    samples = {sample.name: sample for family in text_string_to_metric_families(page) for sample in family.samples}
    for name, labels in EXPECTED.items():
        assert (
            samples[name].labels.keys() - {"otel_scope_name", "otel_scope_version", "otel_scope_schema_url"} == labels
        )
    assert samples["llm_d_epp_request_cached_tokens_sum"].value == 64
    assert samples["llm_d_epp_request_input_tokens_sum"].labels["target_model_name"] == "m2"
    assert samples["llm_d_epp_ready_endpoints"].value == 3
