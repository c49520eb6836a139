"""Prometheus' rules: each alert fires for its cause, and none in a healthy hour. `promtool` evaluates them."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.dashboards.dashboards import DASHBOARDS, FOLDER, rule_object, text_of
from kvatlas.telemetry.instruments import INSTRUMENTS
from tests.alerts import causes
from tests.deployment.custom_resources import model_of
from tests.deployment.tools import ROOT, kustomized

FILE = ROOT / "k8s/alerts/rules.yaml"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PAGE = (ROOT / "docs/observability.md").read_text()

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)

HEALTHY = {
    "kvatlas_indexer_partitions_configured": "64x90",
    "kvatlas_indexer_partitions_owned": "64x90",
    'kvatlas_indexer_lag_seconds_bucket{le="0.015625"}': "0+600x90",
    'kvatlas_indexer_lag_seconds_bucket{le="+Inf"}': "0+600x90",
    "kvatlas_indexer_workers_in_doubt": "0x90",
    'kvatlas_indexer_workers{liveness="alive"}': "4x90",
    'kvatlas_indexer_workers{liveness="lost"}': "0x90",
    'kvatlas_indexer_poison_total{reason="version"}': "0x90",
    'kvatlas_indexer_scrub_workers_total{found="damage"}': "0x90",
    "kvatlas_indexer_store_out_of_memory": "0x90",
    "kvatlas_indexer_store_evicting": "0x90",
    "kvatlas_indexer_store_errors_total": "0x90",
    "kvatlas_router_store_failures_total": "0x90",
    'kvatlas_store_memory_bytes{what="used"}': "400x90",
    'kvatlas_store_memory_bytes{what="limit"}': "1000x90",
    'kvatlas_publisher_feed_connected{worker="w0"}': "1x90",
    'kvatlas_publisher_engine_state{worker="w0", state="up"}': "1x90",
    'kvatlas_publisher_outbox_messages{worker="w0", state="waiting"}': "0x90",
    'kvatlas_publisher_messages_total{worker="w0", step="acknowledged"}': "0+60x90",
    'kvatlas_publisher_feed_total{worker="w0", incident="started_over"}': "0x90",
    'kvatlas_publisher_left_out{worker="w0"}': "0.2x90",
    'kvatlas_publisher_engine_poison_total{worker="w0"}': "0x90",
    'kvatlas_ledger_skipped_total{worker="w0", reason="other_block_size"}': "0x90",
    'kvatlas_ledger_skipped_total{worker="w0", reason="removed_unknown"}': "0+600x90",
    'kvatlas_ledger_blocks_total{worker="w0", change="stored"}': "0+600x90",
    "kvatlas_router_decisions_open_total": "0+1x90",
    'kvatlas_router_decisions_total{outcome="routed"}': "0+600x90",
    'kvatlas_router_decisions_total{outcome="no_workers"}': "0x90",
    'kvatlas_router_decision_duration_seconds_bucket{le="0.0078125"}': "0+600x90",
    'kvatlas_router_decision_duration_seconds_bucket{le="+Inf"}': "0+600x90",
    'kvatlas_proxy_ends_total{end="answered"}': "0+600x90",
    'kvatlas_proxy_ends_total{end="gave_up"}': "0+1x90",
    'kvatlas_proxy_ends_total{end="client_gone"}': "0+6x90",
    'kvatlas_proxy_ends_total{end="shed"}': "0x90",
    'kvatlas_proxy_queued_total{outcome="refused"}': "0x90",
    'kvatlas_http_refused_total{reason="too_many"}': "0x90",
    'kvatlas_process_descriptors{what="open"}': "60x90",
    'kvatlas_process_descriptors{what="most"}': "1024x90",
    "kvatlas_process_certificate_seconds": f"{60 * 86_400}x90",
    "kvatlas_indexer_workers_missing": "0x90",
    "kvatlas_ejection_workers": "0x90",
    "kvatlas_proxy_waiting": "0x90",
    'kvatlas_tokens_cached_total{outcome="equal"}': "0+600x90",
    'kvatlas_tokens_cached_total{outcome="newer"}': "0+6x90",
    'kvatlas_tokens_cached_total{outcome="untold"}': "0x90",
    'kvatlas_tokens_prompts_total{outcome="equal"}': "0+600x90",
    'kvatlas_tokens_prompts_total{outcome="different"}': "0+1x90",
    'kvatlas_tokens_requests_total{outcome="tokenized"}': "0+600x90",
    'kvatlas_tokens_requests_total{outcome="late"}': "0+1x90",
    'kvatlas_gateway_picks_total{by="prompt"}': "0+600x90",
    'kvatlas_gateway_picks_total{by="refused"}': "0+1x90",
}
"""One value per minute, for an hour and a half."""

CAUSES: Mapping[str, Mapping[str, str | None]] = {
    "KvatlasNoIndexer": {"kvatlas_indexer_partitions_owned": None},
    "KvatlasPartitionsWithoutOwner": {"kvatlas_indexer_partitions_owned": "48x90"},
    "KvatlasIndexLate": {'kvatlas_indexer_lag_seconds_bucket{le="0.015625"}': "0x90"},
    "KvatlasWorkersInDoubt": {"kvatlas_indexer_workers_in_doubt": "2x90"},
    "KvatlasWorkersLost": {'kvatlas_indexer_workers{liveness="lost"}': "0x58 1 0x31"},
    "KvatlasMessagesRefused": {'kvatlas_indexer_poison_total{reason="version"}': "0+1x90"},
    "KvatlasIndexDamaged": {'kvatlas_indexer_scrub_workers_total{found="damage"}': "0+0x50 1x40"},
    "KvatlasStoreOutOfMemory": {"kvatlas_indexer_store_out_of_memory": "1x90"},
    "KvatlasStoreNearlyFull": {'kvatlas_store_memory_bytes{what="used"}': "900x90"},
    "KvatlasStoreEvicts": {"kvatlas_indexer_store_evicting": "1x90"},
    "KvatlasStoreFails": {"kvatlas_router_store_failures_total": "0+60x90"},
    "KvatlasFeedDisconnected": {'kvatlas_publisher_feed_connected{worker="w0"}': "0x90"},
    "KvatlasPublishingBlocked": {
        'kvatlas_publisher_outbox_messages{worker="w0", state="waiting"}': "9x90",
        'kvatlas_publisher_messages_total{worker="w0", step="acknowledged"}': "5x90",
    },
    "KvatlasFeedStartsOver": {'kvatlas_publisher_feed_total{worker="w0", incident="started_over"}': "0+1x90"},
    "KvatlasFeedLeftOut": {'kvatlas_publisher_left_out{worker="w0"}': "1x90"},
    "KvatlasUndecodableEvents": {'kvatlas_publisher_engine_poison_total{worker="w0"}': "0+1x90"},
    "KvatlasBlocksNotPublishable": {
        'kvatlas_ledger_skipped_total{worker="w0", reason="other_block_size"}': "0+600x90",
        'kvatlas_ledger_blocks_total{worker="w0", change="stored"}': "0x90",
    },
    "KvatlasDecisionsWithoutIndex": {"kvatlas_router_decisions_open_total": "0+100x90"},
    "KvatlasDecisionsSlow": {'kvatlas_router_decision_duration_seconds_bucket{le="0.0078125"}': "0x90"},
    "KvatlasNoWorkers": {'kvatlas_router_decisions_total{outcome="no_workers"}': "0+10x90"},
    "KvatlasRequestsFail": {'kvatlas_proxy_ends_total{end="gave_up"}': "0+60x90"},
    "KvatlasClientsGaveUp": {
        'kvatlas_proxy_ends_total{end="answered"}': "0+20x90",
        'kvatlas_proxy_ends_total{end="gave_up"}': "0x90",
        'kvatlas_proxy_ends_total{end="client_gone"}': "0+2x90",
    },
    "KvatlasRequestsRefused": {'kvatlas_proxy_queued_total{outcome="refused"}': "0x55 0+1x34"},
    "KvatlasCertificateExpires": {"kvatlas_process_certificate_seconds": f"{13 * 86_400}x90"},
    "KvatlasDescriptorsShort": {'kvatlas_process_descriptors{what="most"}': "64x90"},
    "KvatlasEngineStalled": {'kvatlas_progress_stalled{worker="w0"}': "1x90"},
    "KvatlasWorkersEjected": {"kvatlas_ejection_workers": "1x90"},
    "KvatlasRequestsWait": {"kvatlas_proxy_waiting": "7x90"},
    "KvatlasPredictionsWrong": {'kvatlas_tokens_cached_total{outcome="newer"}': "0+200x90"},
    "KvatlasTokenizerWrong": {'kvatlas_tokens_prompts_total{outcome="different"}': "0+100x90"},
    "KvatlasCachedTokensNotReported": {
        'kvatlas_tokens_cached_total{outcome="equal"}': "0x90",
        'kvatlas_tokens_cached_total{outcome="newer"}': "0x90",
        'kvatlas_tokens_cached_total{outcome="untold"}': "0+600x90",
    },
    "KvatlasTokenIdsMissing": {'kvatlas_tokens_requests_total{outcome="late"}': "0+100x90"},
    "KvatlasPickerRefuses": {'kvatlas_gateway_picks_total{by="refused"}': "0+60x90"},
}
"""The differences from the healthy hour; None: the series is missing."""

_ALL_GONE = {'kvatlas_indexer_workers{liveness="alive"}': "0x90", "kvatlas_indexer_workers_missing": "4x90"}
"""No request shows this: routers without workers are not ready, so none reaches them."""

_LE = {
    "KvatlasIndexLate": 'kvatlas_indexer_lag_seconds_bucket{le="8.0"}',
    "KvatlasDecisionsSlow": 'kvatlas_router_decision_duration_seconds_bucket{le="0.125"}',
}
"""The bucket that a histogram's values are in instead."""

SERIES = sorted({*HEALTHY, *_LE.values(), *(series for changes in CAUSES.values() for series in changes)})
"""All series that the rules are tested with; tests/end_to_end/test_observability.py finds each one on a running fleet."""


def series_of(changes: Mapping[str, str | None]) -> list[dict[str, str]]:
    merged = {**HEALTHY, **changes}
    return [{"series": series, "values": values} for series, values in merged.items() if values is not None]


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_valid() -> None:
    promtool("check", "rules", str(FILE))


@needs_promtool
def test_each_alert_fires_by_its_cause_and_alone_and_none_in_a_healthy_hour(tmp_path: Path) -> None:
    assert CAUSES.keys() == ALERTS.keys()
    tests = [_unit_test({}), _unit_test(_ALL_GONE, "KvatlasNoWorkers", "KvatlasWorkersLost")]
    for alert, changes in CAUSES.items():
        more = {} if alert not in _LE else {_LE[alert]: "0+600x90"}
        tests.append(_unit_test({**changes, **more}, alert))
    file = tmp_path / "alerts_test.yaml"
    # every second minute, because an hour of each alert takes 0.3 s of CPU time at one evaluation a minute
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "2m", "tests": tests}))
    promtool("test", "rules", str(file))


def _unit_test(changes: Mapping[str, str | None], *fires: str) -> dict[str, Any]:
    """A test that only these alerts fire after an hour; their texts are not tested."""
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in fires]
    return {
        "name": ", ".join(fires) or "a healthy hour",
        "interval": "1m",
        "input_series": series_of(changes),
        "promql_expr_test": [{"eval_time": "60m", "expr": firing, "exp_samples": samples}],
    }


def test_every_alert_has_a_cause_that_makes_it_on_running_processes() -> None:
    assert set[str]().union(*(alerts for _, alerts in causes.CAUSES.values())) == ALERTS.keys()


def test_every_alert_has_a_section_in_the_runbook_and_the_runbook_no_other() -> None:
    sections = re.findall(r"^### (Kvatlas\w+)$", PAGE, re.MULTILINE)
    assert sorted(sections) == sorted(ALERTS)
    for alert, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/observability.md#{alert.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]


def names_in(expr: str) -> set[str]:
    """The names of metrics in an expression, as Prometheus spells them."""
    return set(re.findall(r"\b((?:kvatlas|gen_ai|db_client|http_server|messaging)_\w+)", expr))


def selectors_in(expr: str) -> set[str]:
    """The metrics in an expression, with their label selectors."""
    return {
        found[0]
        for found in re.finditer(r"\b(?:kvatlas|gen_ai|db_client|http_server|messaging)_\w+(?:\{[^}]*\})?", expr)
    }


def exported_names() -> set[str]:
    """The names of every instrument in Prometheus."""
    found: set[str] = set()
    for instrument in {series.instrument for group in INSTRUMENTS.values() for series in group.values()}:
        name = instrument.name.replace(".", "_")
        name += {"s": "_seconds", "By": "_bytes"}.get(instrument.unit, "")
        name = name.replace("_bytes_bytes", "_bytes")
        endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}[instrument.kind]
        found |= {name + ending for ending in endings}
    return found


def test_rules_and_dashboards_name_metrics_that_exist() -> None:
    expressions: Sequence[str] = [rule["expr"] for rule in RULES]
    expressions = [
        *expressions,
        *(query.expr for board in DASHBOARDS for panel in board.panels for query in panel.queries),
    ]
    named = set().union(*map(names_in, expressions))
    assert named - exported_names() == set()


def test_kubernetes_gets_the_same_rules_and_dashboards() -> None:
    assert (FILE.parent / "prometheus-rule.yaml").read_text() == rule_object(), (
        "run python -m k8s.dashboards.dashboards"
    )
    (rule,) = kustomized(ROOT / "k8s/alerts")
    model = model_of("PrometheusRule")
    assert model is not None
    read = model.model_validate(rule).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert read == rule and rule["spec"]["groups"] == yaml.safe_load(FILE.read_text())["groups"]
    (dashboards,) = kustomized(ROOT / "k8s/dashboards")
    assert dashboards["data"] == {f"{board.uid}.json": text_of(board) for board in DASHBOARDS}


def test_the_dashboards_files_are_what_their_definitions_render() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == {f"{board.uid}.json" for board in DASHBOARDS}
    for board in DASHBOARDS:
        text = (FOLDER / f"{board.uid}.json").read_text()
        assert text == text_of(board), "run python -m k8s.dashboards.dashboards"
        assert len({panel["id"] for panel in json.loads(text)["panels"]}) == len(board.panels) + board.shows_trace
