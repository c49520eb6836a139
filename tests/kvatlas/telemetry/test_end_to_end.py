"""One trace from the engine batch through the applied batch to the decision, over real NATS and Valkey."""

import anyio
import pytest
from anyio.abc import TaskStatus
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvatlas.identity import Scope
from kvatlas.settings import IndexerSettings
from kvatlas.telemetry.spans import PROCESS, SEND
from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.service import run_indexer
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from router_client import NoWorkers, Prompt, RouterClient, RouterSettings
from tests.eventually import until

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "m")
TOKENS = list(range(64))


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


async def test_a_decision_links_back_to_the_engine_batch(
    span_exporter: InMemorySpanExporter, fresh_nats: str, fresh_valkey: str
) -> None:
    settings = IndexerSettings.load(nats_url=fresh_nats, redis_url=fresh_valkey, stream_storage="memory")

    async def index(*, task_status: TaskStatus[Replica]) -> None:
        await run_indexer(settings, ready=task_status.started)

    def named(name: str) -> dict[int, ReadableSpan]:
        return {span.context.span_id: span for span in span_exporter.get_finished_spans() if span.name == name}

    async with anyio.create_task_group() as tasks:
        await tasks.start(index)
        async with (
            Publisher(PublisherSettings(worker_id="w1", model_id="m", block_size=16), nats=fresh_nats) as publisher,
            RouterClient.open(fresh_valkey, RouterSettings(deadline_ms=None)) as router,
        ):
            await publisher.stored(TOKENS, block_size=16)
            await publisher.flush()

            async def decided() -> ReadableSpan | None:
                """The span of a decision for w1 by its blocks, once the fleet record has a trace."""
                spans_before = set(named("route kvatlas"))
                try:
                    choice = await router.reserve(Prompt.of_tokens(SCOPE, TOKENS), dry_run=True)
                except NoWorkers:
                    return None
                (span,) = (span for span_id, span in named("route kvatlas").items() if span_id not in spans_before)
                return span if choice.result.overlap_blocks == 4 and span.links else None

            decision = await until(decided, what="a decision that links to an applied batch")
        tasks.cancel_scope.cancel()

    assert decision is not None
    applied = named(PROCESS)
    assert linked(decision) <= set(applied)
    (batch,) = (applied[span_id] for span_id in linked(decision))
    sent = named(SEND)
    assert linked(batch) and linked(batch) <= set(sent)
    carried = [span for span in sent.values() if (span.attributes or {}).get("kvatlas.blocks")]
    assert carried and {(span.attributes or {}).get("kvatlas.worker") for span in carried} == {"w1"}
    assert decision.attributes is not None
    assert decision.attributes["kvatlas.worker"] == "w1" and decision.attributes["kvatlas.overlap_blocks"] == 4
