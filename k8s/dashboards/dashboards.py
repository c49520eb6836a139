"""Grafana's dashboards, in short form: `python -m k8s.dashboards.dashboards` writes the JSON files beside this, and a copy of
the rules in ../alerts for the Prometheus operator.

Metric names are the Prometheus forms of those in kvatlas/telemetry/instruments/.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RULES = FOLDER.parent / "alerts" / "rules.yaml"
RATE = "[$__rate_interval]"
WIDTH, HEIGHT = 8, 7
"""A panel's size; a row in Grafana is 24 wide."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit`: Grafana's name for the unit. `kind`: timeseries or stat. `exemplars`: shows a point for each exemplar kept
    of the histogram; it links to the exemplar's trace."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`variable`: a label by whose values the dashboard can be filtered, and a metric that has it. `shows_trace`: the last
    panel shows the trace whose id is entered."""

    uid: str
    title: str
    panels: Sequence[Panel]
    variable: tuple[str, str] | None = None
    shows_trace: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    """A counter's rate, summed over processes."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}{RATE}))"


def quantiles(metric: str, where: str = "", by: str = "") -> list[Query]:
    """The median and the 99th percentile of a histogram over all processes."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{where}}}{RATE})))", f"p{name}{legend}"
        )
        for q, name in ((0.5, 50), (0.99, 99))
    ]


FLEET = Dashboard(
    "kvatlas-fleet",
    "kvatlas: fleet and savings",
    [
        Panel(
            "Hit rate",
            [
                Query(
                    f"{rate('kvatlas_router_saved_tokens_total')} / ({rate('kvatlas_router_prompt_tokens_total')} > 0)"
                )
            ],
            "percentunit",
            "stat",
            "Share of prompt tokens that engines report as cached",
        ),
        Panel(
            "Engine seconds saved", [Query(f"{rate('kvatlas_router_saved_time_seconds_total')}", "s/s")], "s", "stat"
        ),
        Panel("Prefill tokens saved", [Query(rate("kvatlas_router_saved_tokens_total"), "tokens/s")]),
        Panel("Workers", [Query("sum by (liveness) (kvatlas_indexer_workers)", "{{liveness}}")]),
        Panel("Engines", [Query("sum by (state) (kvatlas_publisher_engine_state)", "{{state}}")]),
        Panel(
            "Requests",
            [
                Query("sum(kvatlas_proxy_in_flight)", "through routers"),
                Query("sum(kvatlas_proxy_waiting)", "waiting in routers"),
                Query("sum(kvatlas_gateway_in_flight)", "through gateways"),
                Query("sum(kvatlas_gateway_waiting)", "waiting in pickers"),
            ],
        ),
        Panel("Time to first token", quantiles("gen_ai_server_time_to_first_token_seconds"), "s"),
        Panel("Request", quantiles("gen_ai_server_request_duration_seconds"), "s"),
        Panel("How requests end", [Query(rate("kvatlas_proxy_ends_total", "end"), "{{end}}")], "reqps"),
        Panel("Index", [Query("sum by (tier) (kvatlas_index_size)", "{{tier}}")]),
        Panel("KV cache described", [Query("sum by (model) (kvatlas_index_bytes)", "{{model}}")], "bytes"),
        Panel("Store memory", [Query("sum by (what) (kvatlas_store_memory_bytes)", "{{what}}")], "bytes"),
    ],
)
INGEST = Dashboard(
    "kvatlas-ingest",
    "kvatlas: ingest health",
    [
        Panel("Lag", quantiles("kvatlas_indexer_lag_seconds"), "s", about="From the engine's event to the index"),
        Panel("Apply calls", quantiles("kvatlas_indexer_apply_duration_seconds"), "s"),
        Panel(
            "Store calls",
            quantiles("db_client_operation_duration_seconds", by="db_stored_procedure_name"),
            "s",
            about="By function, as timed by the indexers and routers that wait for them",
        ),
        Panel("Messages", [Query(rate("kvatlas_indexer_messages_total", "outcome"), "{{outcome}}")]),
        Panel(
            "Partitions without owner",
            [Query("max(kvatlas_indexer_partitions_configured) - sum(kvatlas_indexer_partitions_owned)")],
            kind="stat",
        ),
        Panel("Partitions by replica", [Query("kvatlas_indexer_partitions_owned", "{{instance}}")]),
        Panel("Not applied yet", [Query("topk(8, kvatlas_indexer_partition_pending)", "{{partition}}")]),
        Panel("Workers in doubt", [Query("sum(kvatlas_indexer_workers_in_doubt)")]),
        Panel(
            "Snapshots requested", [Query(rate("kvatlas_indexer_snapshot_requests_total", "outcome"), "{{outcome}}")]
        ),
        Panel("Refused messages", [Query(rate("kvatlas_indexer_poison_total", "reason"), "{{reason}}")]),
        Panel("Feeds connected", [Query("sum(kvatlas_publisher_feed_connected)")], kind="stat"),
        Panel("Feed incidents", [Query(rate("kvatlas_publisher_feed_total", "incident"), "{{incident}}")]),
        Panel("Outboxes", [Query("sum by (state) (kvatlas_publisher_outbox_messages)", "{{state}}")]),
        Panel("Failed sends", [Query(rate("kvatlas_publisher_send_failures_total", "reason"), "{{reason}}")]),
        Panel("Blocks not publishable", [Query(rate("kvatlas_ledger_skipped_total", "reason"), "{{reason}}")]),
        Panel("Scrub", [Query(rate("kvatlas_indexer_scrub_workers_total", "found"), "{{found}}")]),
    ],
)
ROUTING = Dashboard(
    "kvatlas-routing",
    "kvatlas: routing quality",
    [
        Panel("Decisions", quantiles("kvatlas_router_decision_duration_seconds"), "s"),
        Panel("Steps", quantiles("kvatlas_router_decision_step_duration_seconds", by="step"), "s"),
        Panel("Before a request is sent", quantiles("kvatlas_proxy_overhead_seconds"), "s"),
        Panel("Token reading", quantiles("kvatlas_tokens_duration_seconds"), "s"),
        Panel("Decisions by outcome", [Query(rate("kvatlas_router_decisions_total", "outcome"), "{{outcome}}")]),
        Panel("Without the index", [Query(rate("kvatlas_router_decisions_open_total", "cause"), "{{cause}}")]),
        Panel(
            "Cached tokens, compared with the prediction",
            [Query(rate("kvatlas_tokens_cached_total", "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Cached tokens",
            [
                Query(rate("kvatlas_tokens_predicted_total"), "predicted"),
                Query(rate("kvatlas_tokens_found_total"), "found"),
            ],
        ),
        Panel(
            "Prediction error, tokens",
            [Query(rate("kvatlas_router_prediction_error_sum", "direction"), "{{direction}}")],
            about="Tokens per second by which engines found more, or fewer, than predicted",
        ),
        Panel("Token ids", [Query(rate("kvatlas_tokens_requests_total", "outcome"), "{{outcome}}")]),
        Panel("Workers ejected", [Query("max(kvatlas_ejection_workers)")], kind="stat"),
        Panel("Engines stalled", [Query("sum(max by (worker) (kvatlas_progress_stalled))")], kind="stat"),
        Panel("Engines' answers", [Query(rate("kvatlas_ejection_answers_total", "verdict"), "{{verdict}}")]),
        Panel("Retries", [Query(rate("kvatlas_proxy_retries_total", "reason"), "{{reason}}")]),
        Panel("Over limits", [Query(rate("kvatlas_router_decisions_over_limits_total", "limit"), "{{limit}}")]),
        Panel("Error in expected times", [Query("max by (of) (kvatlas_router_rates_error)", "{{of}}")], "percentunit"),
    ],
)
_WORKER = 'worker=~"$worker"'
WORKER = Dashboard(
    "kvatlas-worker",
    "kvatlas: one worker",
    [
        Panel("Engine", [Query(f"max by (state) (kvatlas_publisher_engine_state{{{_WORKER}}})", "{{state}}")]),
        Panel("Feed connected", [Query(f"min(kvatlas_publisher_feed_connected{{{_WORKER}}})")], kind="stat"),
        Panel(
            "Since the last event", [Query(f"max(kvatlas_publisher_feed_silence_seconds{{{_WORKER}}})")], "s", "stat"
        ),
        Panel("Blocks published", [Query(f"sum by (tier) (kvatlas_ledger_held{{{_WORKER}}})", "{{tier}}")]),
        Panel(
            "Blocks held back",
            [
                Query(f"sum(kvatlas_ledger_orphans{{{_WORKER}}})", "after a hole"),
                Query(f"sum(kvatlas_ledger_awaiting{{{_WORKER}}})", "events without their parent"),
            ],
        ),
        Panel("Changes", [Query(rate("kvatlas_publisher_blocks_total", "change", _WORKER), "{{change}}")]),
        Panel("Engine's events", [Query(rate("kvatlas_publisher_engine_events_total", "", _WORKER))]),
        Panel("Incidents", [Query(rate("kvatlas_publisher_feed_total", "incident", _WORKER), "{{incident}}")]),
        Panel("Outbox", [Query(f"sum by (state) (kvatlas_publisher_outbox_messages{{{_WORKER}}})", "{{state}}")]),
        Panel(
            "Learned: time per prompt token", [Query(f"avg(kvatlas_router_rates_prefill_seconds{{{_WORKER}}})")], "s"
        ),
        Panel("Learned: time per decode step", [Query(f"avg(kvatlas_router_rates_step_seconds{{{_WORKER}}})")], "s"),
    ],
    ("worker", "kvatlas_publisher_engine_state"),
)
_POINTS = "Each point is a sampled request and links to its trace"


def _stage(title: str, metric: str) -> Panel:
    return Panel(title, quantiles(metric), "s", about=_POINTS, exemplars=True)


PATH = Dashboard(
    "kvatlas-path",
    "kvatlas: one request's path",
    [
        _stage("Engine's event to index", "kvatlas_indexer_lag_seconds"),
        _stage("Applying it", "kvatlas_indexer_apply_duration_seconds"),
        _stage("Reading token ids", "kvatlas_tokens_duration_seconds"),
        _stage("Deciding", "kvatlas_router_decision_duration_seconds"),
        Panel(
            "Decision steps",
            quantiles("kvatlas_router_decision_step_duration_seconds", by="step"),
            "s",
            about=_POINTS,
            exemplars=True,
        ),
        _stage("Until it is sent to an engine", "kvatlas_proxy_overhead_seconds"),
        _stage("Until its first token", "gen_ai_server_time_to_first_token_seconds"),
        _stage("Until its end", "gen_ai_server_request_duration_seconds"),
    ],
    shows_trace=True,
)
DASHBOARDS = (FLEET, INGEST, ROUTING, WORKER, PATH)
SOURCE = {"type": "prometheus", "uid": "${source}"}
TRACES = {"type": "jaeger", "uid": "${traces}"}


def rendered(board: Dashboard) -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    if board.variable is not None:
        label, metric = board.variable
        query = {"query": f"label_values({metric}, {label})", "refId": label}
        variables.append(
            {"name": label, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1}
        )
    if board.shows_trace:
        variables.append({"name": "traces", "label": "Traces", "type": "datasource", "query": "jaeger"})
        variables.append({"name": "trace", "label": "Trace id", "type": "textbox", "query": ""})
    links = [
        {"title": other.title, "type": "link", "url": f"/d/{other.uid}", "keepTime": True}
        for other in DASHBOARDS
        if other is not board
    ]
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["kvatlas"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "links": links,
        "panels": [
            *(_panel(number, panel) for number, panel in enumerate(board.panels)),
            *([_trace_panel(len(board.panels))] if board.shows_trace else []),
        ],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    each_row = 24 // WIDTH
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": number % each_row * WIDTH, "y": number // each_row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": query.expr,
                "legendFormat": query.legend or panel.title,
                "datasource": SOURCE,
                **({"exemplar": True} if panel.exemplars else {}),
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _trace_panel(number: int) -> dict[str, Any]:
    """The whole trace, as wide as the dashboard."""
    each_row = 24 // WIDTH
    return {
        "id": number + 1,
        "type": "traces",
        "title": "Trace $trace",
        "datasource": TRACES,
        "gridPos": {"x": 0, "y": -(-number // each_row) * HEIGHT, "w": 24, "h": 3 * HEIGHT},
        "targets": [{"refId": "A", "query": "$trace", "datasource": TRACES}],
    }


def text_of(board: Dashboard) -> str:
    """The content of the dashboard's file."""
    return json.dumps(rendered(board), indent=2) + "\n"


def rule_object() -> str:
    """The rules as an object of the Prometheus operator."""
    groups = "".join(f"  {line}" if line.strip() else line for line in RULES.read_text().splitlines(keepends=True))
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: kvatlas\nspec:\n"
    return f"# Written by `python -m k8s.dashboards.dashboards` from rules.yaml.\n{head}{groups}"


def write() -> None:
    """Write every dashboard's file, and the operator's rules."""
    RULES.with_name("prometheus-rule.yaml").write_text(rule_object())
    for board in DASHBOARDS:
        (FOLDER / f"{board.uid}.json").write_text(text_of(board))


if __name__ == "__main__":
    write()
