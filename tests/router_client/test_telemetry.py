"""One span per call, with the decision."""

import json

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvatlas.fleet.records import Role
from kvatlas.index.memory.index import MemoryIndex
from router_client import NoWorkers, PairSettings, Prompt, RouterClient, RouterSettings, StaticFleet
from tests.router_client.pools import SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

PROMPT = Prompt.of_tokens(SCOPE, list(range(100)), id="r-1")


def decisions(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of decisions, without those of their steps."""
    return [span for span in spans.get_finished_spans() if span.name != "read pool"]


async def test_a_decision_is_one_span(spans: InMemorySpanExporter) -> None:
    index, w1 = MemoryIndex(), worker("w1")
    await hold(index, w1, list(range(100)), blocks=5)
    choice = await RouterClient(index, StaticFleet(pool(w1, worker("w2")))).reserve(PROMPT, dry_run=True)
    (span,) = decisions(spans)
    assert span.name == "route kvatlas"
    attributes = dict(span.attributes or {})
    assert attributes["kvatlas.request"] == "r-1"
    assert attributes["kvatlas.worker"] == "w1"
    assert (
        attributes["kvatlas.required_blocks"],
        attributes["kvatlas.overlap_blocks"],
        attributes["kvatlas.candidates"],
    ) == (7, 5, 2)
    assert (attributes["kvatlas.usable_tokens"], attributes["kvatlas.cost_us"]) == (80, choice.cost.score_us)
    assert json.loads(str(attributes["kvatlas.explanation"])) == choice.explanation()


async def test_a_pair_is_one_span(spans: InMemorySpanExporter) -> None:
    workers = pool(worker("p", role=Role.PREFILL, load={}), worker("d", load={"queued_prefill_tokens": 9_000}))
    settings = RouterSettings(deadline_ms=None, pairs=PairSettings(least_new_tokens=0))
    pair = await RouterClient(MemoryIndex(), StaticFleet(workers), settings).reserve_pd(PROMPT, dry_run=True)
    (span,) = decisions(spans)
    assert span.name == "route_pd kvatlas"
    attributes = dict(span.attributes or {})
    assert (attributes["kvatlas.worker"], attributes["kvatlas.decode_worker"]) == ("p", "d")
    assert json.loads(str(attributes["kvatlas.explanation"])) == pair.explanation()


async def test_a_refused_request_is_a_failed_span(spans: InMemorySpanExporter) -> None:
    router = RouterClient(MemoryIndex(), StaticFleet({}))
    with pytest.raises(NoWorkers):
        await router.reserve(PROMPT, dry_run=True)
    await router.rank(PROMPT)
    await router.overlap(PROMPT)
    first, *others = decisions(spans)
    assert not first.status.is_ok
    assert [span.name for span in others] == ["rank kvatlas", "overlap kvatlas"]
