"""Decisions about new traces before they have spans."""

from collections import Counter
from threading import Thread

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from kvatlas.telemetry import CurrentSpan, flush_span, inject_headers
from kvatlas.telemetry.root_sampler import decide_roots_first


class CountingSampler(Sampler):
    """Takes every third new trace, so asking twice gives a different answer."""

    def __init__(self, otherwise: Decision = Decision.DROP) -> None:
        self.asked: list[int] = []
        self._otherwise = otherwise

    def should_sample(self, parent_context: object, trace_id: int, *_: object, **__: object) -> SamplingResult:
        self.asked.append(trace_id)
        if len(self.asked) % 3:
            return SamplingResult(self._otherwise)
        return SamplingResult(Decision.RECORD_AND_SAMPLE, {"sampler.said": "third"})

    def get_description(self) -> str:
        return "every third"


def provider_of(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = decide_roots_first(TracerProvider(sampler=sampler))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return provider, exporter


def test_a_sampler_is_asked_once_for_each_flush_and_its_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CountingSampler()
    _, exporter = provider_of(sampler, monkeypatch)
    headers = []
    for _ in range(9):
        with flush_span("w1", messages=1):
            headers.append(inject_headers())
    assert len(sampler.asked) == len(set(sampler.asked)) == 9
    assert [bool(found) for found in headers] == [False, False, True] * 3
    spans = exporter.get_finished_spans()
    assert [span.context.trace_id for span in spans] == sampler.asked[2::3]
    assert all(span.attributes is not None and span.attributes["sampler.said"] == "third" for span in spans)
    assert all(span.parent is None for span in spans)


def test_an_unsampled_flush_makes_no_span_and_one_that_is_only_recorded_does(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, _ = provider_of(ALWAYS_OFF, monkeypatch)
    made: Counter[str] = Counter()
    ids = provider.id_generator
    monkeypatch.setattr(ids, "generate_span_id", lambda: made.update(["span"]) or 7)
    with flush_span("w1", messages=1) as span:
        assert not span.is_recording() and not made
    provider, _ = provider_of(CountingSampler(otherwise=Decision.RECORD_ONLY), monkeypatch)
    with flush_span("w1", messages=1) as span:
        assert span.is_recording() and inject_headers() is None


@pytest.mark.parametrize("sampled", [False, True])
def test_inside_a_span_the_parent_decides_as_the_sampler_says(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, exporter = provider_of(ParentBased(ALWAYS_OFF if sampled else ALWAYS_ON), monkeypatch)
    parent = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(int(sampled)))
    with CurrentSpan(NonRecordingSpan(parent)), flush_span("w1", messages=1):
        assert bool(inject_headers()) is sampled
    assert [span.context.trace_id for span in exporter.get_finished_spans()] == [7] * sampled


def test_the_share_of_sampled_traces_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, exporter = provider_of(ParentBased(TraceIdRatioBased(0.25)), monkeypatch)
    for _ in range(4_000):
        with flush_span("w1", messages=1):
            pass
    spans = exporter.get_finished_spans()
    assert 850 < len(spans) < 1_150  # five standard deviations
    assert all(span.context.trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < 1 << 62 for span in spans)
    assert len({span.context.trace_id for span in spans}) == len(spans)


def test_a_decision_is_of_the_thread_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CountingSampler()
    provider, _ = provider_of(sampler, monkeypatch)
    tracer = provider.get_tracer("test")
    drops = [provider.sampler.drops_root("flush", SpanKind.PRODUCER) for _ in range(3)]  # type: ignore[attr-defined]
    assert drops == [True, True, False]
    other: list[SpanContext] = []
    thread = Thread(target=lambda: other.append(tracer.start_span("another").get_span_context()))
    thread.start()
    thread.join()
    own = [tracer.start_span("flush").get_span_context() for _ in range(2)]
    assert other[0].trace_id not in sampler.asked[:3] and own[0].trace_id == sampler.asked[2]
    assert own[0].trace_flags.sampled and own[1].trace_id not in sampler.asked[:4]
