"""The workers that get the trace of an applied batch."""

from collections.abc import Mapping

import anyio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvatlas.bus.partition_batch import Position
from kvatlas.bus.queue import PartitionQueue
from kvatlas.bus.subjects import partition_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult
from kvatlas.telemetry import flush_span, inject_headers
from kvatlas.telemetry.spans import PROCESS
from kvatlas_indexer.applier import Applier
from kvatlas_indexer.counters import IndexerCounters
from tests.eventually import until
from tests.kvatlas.index.message_source import MessageSource

pytestmark = pytest.mark.anyio

START = Position(77, 100)


async def test_a_batch_without_an_engine_event_becomes_no_workers_trace(span_exporter: InMemorySpanExporter) -> None:
    """No engine batch is behind a checkpoint or a snapshot, so its trace would lead nowhere."""
    index = MemoryIndex()
    applied: list[Mapping[str, str]] = []

    def on_applied(_: ApplyResult, traces: Mapping[str, str]) -> None:
        applied.append(traces)

    applier = Applier(0, index, IndexerCounters(), on_applied=on_applied)
    for worker_id in ("by-engine", "by-itself"):
        queue = PartitionQueue(partition_of(worker_id, index.partitions), START, 0)
        await index.set_position(queue.partition, None, START)
        headers = None
        if worker_id == "by-engine":
            with flush_span(worker_id, messages=1):
                headers = inject_headers()
        queue.add(MessageSource(worker_id).begin(1), 100, "$JS.ACK.S.C.1.101.1.0.0", headers)
        applier.attach(queue)
    async with anyio.create_task_group() as group:
        group.start_soon(applier.run)
        await until(lambda: bool(applied), what="both are applied in one call")
        group.cancel_scope.cancel()
    (process,) = (span for span in span_exporter.get_finished_spans() if span.name == PROCESS)
    (traces,) = applied
    assert set(traces) == {"by-engine"}
    assert f"{process.context.span_id:016x}" in traces["by-engine"] and len(process.links) == 1
