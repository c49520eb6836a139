"""Spans and their context in message headers."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from kvatlas.telemetry import (
    MAX_LINKS,
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
    snapshot_request_span,
    snapshot_span,
    store_span,
    tracing_enabled,
)

SAMPLED = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(1))


def test_a_batch_without_a_traced_message_has_no_span(span_exporter: InMemorySpanExporter) -> None:
    with apply_span(messages=3) as span:
        assert not span.is_recording() and current_traceparent() is None
    assert not span_exporter.get_finished_spans()


def test_tracing_is_off_by_default_and_then_creates_no_span() -> None:
    assert not tracing_enabled()
    with flush_span("w1", messages=1) as span:
        assert not span.is_recording()
        assert inject_headers() is None
        assert current_traceparent() is None
    with apply_span([Link(SAMPLED)]) as span, decision_span("route") as decision:
        assert not span.is_recording()
        describe_decision(decision, worker_id="w1")


def test_an_applied_batch_links_to_the_flush_whose_headers_it_carries(span_exporter: InMemorySpanExporter) -> None:
    with flush_span("w1", messages=2, events=3, blocks=5):
        headers = inject_headers()
    link = extract_link(headers)
    assert link is not None
    with apply_span([link], shard=0, partitions=1, messages=2):
        pass
    sent, applied = span_exporter.get_finished_spans()
    assert sent.name == "send kvatlas.events.{partition}.{worker}" and sent.kind is SpanKind.PRODUCER
    assert applied.name == "process kvatlas.events.{partition}.{worker}" and applied.kind is SpanKind.CONSUMER
    for span in (sent, applied):
        assert span.attributes is not None and span.attributes["messaging.system"] == "nats"
        assert span.attributes["messaging.batch.message_count"] == 2
    assert [found.context.span_id for found in applied.links] == [sent.context.span_id]
    assert applied.context.trace_id == sent.context.trace_id, "a batch with a sampled message is sampled"


def test_a_batch_names_its_workers_and_their_incarnations(span_exporter: InMemorySpanExporter) -> None:
    for workers in ({("w1", 2**63): 3}, {("w1", 1): 1, ("w2", 2): 4}):
        with apply_span([Link(SAMPLED)]) as span:
            describe_batch(span, workers)
    one, several = span_exporter.get_finished_spans()
    assert one.attributes is not None
    assert (one.attributes["kvatlas.worker"], one.attributes["kvatlas.incarnation"]) == ("w1", str(2**63))
    named = [dict(event.attributes or {}) for event in several.events]
    assert [(found["kvatlas.worker"], found["kvatlas.incarnation"], found["kvatlas.messages"]) for found in named] == [
        ("w1", "1", 1),
        ("w2", "2", 4),
    ]


def test_a_snapshot_links_to_the_request_for_it(span_exporter: InMemorySpanExporter) -> None:
    with snapshot_request_span("w1", above=7, doubt="gap"):
        request = inject_headers()
    with snapshot_span("w1", incarnation=8, blocks=5, reason="a snapshot was requested", request=request):
        assert inject_headers() is not None
    asked, sent = span_exporter.get_finished_spans()
    assert asked.attributes is not None and sent.attributes is not None
    assert (asked.attributes["kvatlas.doubt"], asked.attributes["kvatlas.incarnation"]) == ("gap", "7")
    assert (sent.attributes["kvatlas.snapshot"], sent.attributes["kvatlas.incarnation"]) == (
        "a snapshot was requested",
        "8",
    )
    assert [found.context.span_id for found in sent.links] == [asked.context.span_id]


def test_calls_to_the_store_are_spans_inside_a_sampled_one_only(span_exporter: InMemorySpanExporter) -> None:
    server = {"server.address": "redis", "server.port": 6379}
    with store_span("FCALL", "kvatlas_apply", server) as span:
        assert not span.is_recording()
    with apply_span([Link(SAMPLED)]), store_span("FCALL_RO", "kvatlas_overlap", server, calls=2):
        pass
    call, applied = span_exporter.get_finished_spans()
    assert (call.name, call.kind) == ("FCALL_RO kvatlas_overlap", SpanKind.CLIENT)
    assert call.parent is not None and call.parent.span_id == applied.context.span_id
    assert dict(call.attributes or {}) == {
        "db.system.name": "redis",
        "db.operation.name": "FCALL_RO",
        "db.stored_procedure.name": "kvatlas_overlap",
        "db.operation.batch.size": 2,
        **server,
    }


def test_a_decision_links_to_the_applied_batch_in_the_fleet_record(span_exporter: InMemorySpanExporter) -> None:
    with apply_span([Link(SAMPLED)], messages=1):
        record = current_traceparent()
    with decision_span("route", request_id="r1", model_id="m") as span:
        describe_decision(
            span, worker_id="w1", required_blocks=4, overlap_blocks=3, candidates=2, applied=[record, None, record]
        )
    applied, decision = span_exporter.get_finished_spans()
    assert decision.name == "route kvatlas"
    assert [found.context.span_id for found in decision.links] == [applied.context.span_id]
    assert decision.attributes is not None
    assert decision.attributes["kvatlas.worker"] == "w1" and decision.attributes["kvatlas.overlap_blocks"] == 3


def test_a_decision_is_a_child_of_the_callers_span(span_exporter: InMemorySpanExporter) -> None:
    with trace.get_tracer("app").start_as_current_span("request"), decision_span("rank"):
        pass
    decision, request = span_exporter.get_finished_spans()
    assert decision.parent is not None and decision.parent.span_id == request.context.span_id


def test_a_decision_inside_a_span_that_is_not_sampled_has_none(span_exporter: InMemorySpanExporter) -> None:
    dropped = NonRecordingSpan(SpanContext(7, 9, is_remote=False))
    with trace.use_span(dropped), decision_span("route") as decision:
        assert decision is INVALID_SPAN and trace.get_current_span() is dropped
    with trace.use_span(NonRecordingSpan(SAMPLED)), decision_span("route"):
        pass
    (decided,) = span_exporter.get_finished_spans()
    assert decided.parent is not None and decided.parent.span_id == SAMPLED.span_id


def test_a_batch_links_each_span_once_and_at_most_32(span_exporter: InMemorySpanExporter) -> None:
    collector = LinkCollector()
    for _ in range(MAX_LINKS + 8):
        with flush_span("w1", messages=2):
            headers = inject_headers()
        collector.add(headers)
        collector.add(headers)
    links = collector.take()
    assert len(links) == MAX_LINKS == len({link.context.span_id for link in links})
    assert collector.take() == []
    span_exporter.clear()
    with apply_span([*links, *links]):
        pass
    assert len(span_exporter.get_finished_spans()[0].links) == MAX_LINKS


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_context_yields_no_link(span_exporter: InMemorySpanExporter, traceparent: str) -> None:
    assert link_of(traceparent) is None
    assert extract_link({"traceparent": traceparent}) is None
    assert extract_link({"other": "x"}) is None and extract_link(None) is None


def test_an_error_marks_the_span_as_failed(span_exporter: InMemorySpanExporter) -> None:
    with pytest.raises(RuntimeError), apply_span([Link(SAMPLED)]):
        raise RuntimeError("store gone")
    (span,) = span_exporter.get_finished_spans()
    assert not span.status.is_ok
