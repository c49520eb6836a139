"""The trace of one of the demo's requests: from the caller to the engine batches that the choice was based on."""

from collections.abc import Mapping, Sequence

from rich.tree import Tree

from kvatlas_simulator.demo.trace_receiver import ReceivedSpan

_SHOWN: Mapping[str, str] = {
    "kvatlas.worker": "{}",
    "kvatlas.prompt_tokens": "{} tokens",
    "kvatlas.overlap_blocks": "{} blocks held",
    "kvatlas.blocks": "{} blocks",
    "kvatlas.incarnation": "incarnation {}",
    "kvatlas.snapshot": "snapshot: {}",
    "server.port": "port {}",
    "gen_ai.usage.cache_read.input_tokens": "{} tokens cached",
}
"""The attributes to show, and how."""


def environment(endpoint: str) -> dict[str, str]:
    """Variables of processes that send their traces there without much delay, because spans that are still unsent when a
    process ends may be lost."""
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{endpoint}/v1/traces",
        "OTEL_METRICS_EXPORTER": "none",
    }


def draw_path(spans: Sequence[ReceivedSpan]) -> Tree | None:
    """The path of the last request whose choice was based on traced batches; None without one."""
    by_id = {span.id: span for span in spans}
    children: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        children.setdefault(span.parent, []).append(span)
    rested = [span for span in spans if span.name == "route kvatlas" and span.links & by_id.keys()]
    for route in reversed(rested):
        root = by_id.get(route.parent)
        if root is not None and route.attributes.get("kvatlas.overlap_blocks"):
            tree = Tree(f"one request's path, trace {root.trace}")
            _draw(tree, root, children, by_id)
            return tree
    return None


def _draw(
    under: Tree, span: ReceivedSpan, children: Mapping[str, Sequence[ReceivedSpan]], by_id: Mapping[str, ReceivedSpan]
) -> None:
    branch = under.add(_describe(span))
    for child in children.get(span.id, ()):
        _draw(branch, child, children, by_id)
    if span.name == "route kvatlas":
        for link in sorted(span.links & by_id.keys()):
            batch = by_id[link]
            linked = branch.add("based on " + _describe(batch))
            for origin in sorted(batch.links & by_id.keys()):
                linked.add(_describe(by_id[origin]))


def _describe(span: ReceivedSpan) -> str:
    told = [how.format(span.attributes[name]) for name, how in _SHOWN.items() if name in span.attributes]
    first = span.events.get("first token", {}).get("kvatlas.time_to_first_token")
    if first is not None:
        told.append(f"first token after {first * 1e3:,.1f} ms")
    return f"{span.name} ({span.service}), {span.seconds * 1e3:,.1f} ms" + (": " + ", ".join(told) if told else "")
