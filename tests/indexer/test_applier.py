"""One shard's applier over the memory index; tests fill its queues."""

import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.queue import PartitionQueue
from kvatlas.bus.subjects import partition_of
from kvatlas.bus.wire import SEQ, WORKER_ID, RawMessage
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult
from kvatlas_indexer.applier import CALL_BYTES, LARGE_BYTES, Applier
from kvatlas_indexer.counters import IndexerCounters
from tests.eventually import until
from tests.kvatlas.index.message_source import MessageSource, contents

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
START = Position(77, 100)


class WorkerQueue:
    """The queue of one worker's partition, and the worker's publisher."""

    def __init__(self, worker_id: str) -> None:
        self.worker = MessageSource(worker_id)
        self.queue = PartitionQueue(partition_of(worker_id, 64), START, 0)
        self.count = 0

    def add(self, raw: RawMessage, size_bytes: int = 100) -> None:
        self.count += 1
        self.queue.add(raw, size_bytes, f"$JS.ACK.S.C.1.{100 + self.count}.{self.count}.0.0")


@asynccontextmanager
async def applying(index: MemoryIndex, *filled: WorkerQueue, applier: Applier | None = None) -> AsyncIterator[Applier]:
    applier = applier or Applier(0, index, IndexerCounters())
    for one in filled:
        await index.set_position(one.queue.partition, None, START)
        applier.attach(one.queue)
    async with anyio.create_task_group() as group:
        group.start_soon(applier.run)
        yield applier
        group.cancel_scope.cancel()


async def test_one_call_carries_messages_of_several_partitions() -> None:
    calls: list[int] = []

    class RecordingIndex(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            calls.append(len(batches))
            return await super().apply(shard, batches)

    index = RecordingIndex()
    filled = [WorkerQueue(f"w{i}") for i in range(3)]
    for one in filled:
        one.add(one.worker.begin(1))
    async with applying(index, *filled):
        await until(lambda: all(one.queue.at_end for one in filled), what="all messages are applied")
    assert calls == [3]


async def test_a_call_is_bounded_in_bytes_and_every_partition_gets_its_turn() -> None:
    order: list[int] = []

    class RecordingIndex(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            order.append(batches[0].partition)
            assert sum(len(batch.messages) for batch in batches) <= 2
            return await super().apply(shard, batches)

    index = RecordingIndex()
    filled = [WorkerQueue(f"w{i}") for i in range(3)]
    for one in filled:
        one.add(one.worker.begin(1), CALL_BYTES // 2)
        for number in range(5):
            one.add(one.worker.store(SCOPE, number.to_bytes(8, "little")), CALL_BYTES // 2)
    async with applying(index, *filled):
        await until(lambda: all(one.queue.at_end for one in filled), what="all messages are applied")
    assert set(order[:3]) == {one.queue.partition for one in filled}


async def test_small_queues_do_not_wait_for_a_large_one() -> None:
    small_is_applied = anyio.Event()

    class SlowIndex(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            if any(raw[WORKER_ID] == "large" for batch in batches for raw in batch.messages):
                await small_is_applied.wait()
            return await super().apply(shard, batches)

    index = SlowIndex()
    large, small = WorkerQueue("large"), WorkerQueue("small")
    large.add(large.worker.begin(1), LARGE_BYTES)
    async with applying(index, large, small) as applier:
        await until(lambda: large.queue.in_flight, what="the large queue's call is under way")
        small.add(small.worker.begin(1))
        applier.wake()
        await until(lambda: small.queue.at_end, what="the small queue is applied")
        assert not large.queue.at_end
        small_is_applied.set()
        await until(lambda: large.queue.at_end, what="the large queue is applied")


async def test_a_queue_that_grows_and_shrinks_is_in_one_call_at_a_time_and_in_order() -> None:
    under_way: set[int] = set()

    class SlowIndex(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            partitions = {batch.partition for batch in batches}
            assert not partitions & under_way
            under_way.update(partitions)
            await anyio.lowlevel.checkpoint()
            under_way.difference_update(partitions)
            return await super().apply(shard, batches)

    index, rng = SlowIndex(), random.Random(5)
    filled = [WorkerQueue(f"w{i}") for i in range(4)]
    for one in filled:
        one.add(one.worker.begin(1))
    async with applying(index, *filled) as applier:
        for number in range(400):
            one = rng.choice(filled)
            one.add(
                one.worker.store(SCOPE, number.to_bytes(8, "little")), rng.choice([100, LARGE_BYTES // 2, LARGE_BYTES])
            )
            applier.wake()
            if rng.random() < 0.5:
                await anyio.lowlevel.checkpoint()
        await until(lambda: all(one.queue.at_end for one in filled), what="all messages are applied")
    for one in filled:
        assert await contents(index, one.worker.worker_id) == one.worker.held
        assert not one.queue.failed.is_set()


@pytest.mark.parametrize(
    "error", [InvalidValue("scope id of another scope"), struct.error("too large"), OverflowError()]
)
async def test_a_message_that_the_index_refuses_does_not_stop_the_others(error: Exception) -> None:
    refused: list[tuple[int, int]] = []

    class RefusingIndex(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            if any(raw[WORKER_ID] == "bad" for batch in batches for raw in batch.messages):
                raise error
            return await super().apply(shard, batches)

    index = RefusingIndex()
    applier = Applier(
        0, index, IndexerCounters(), on_refused=lambda partition, raw, _: refused.append((partition, raw[SEQ]))
    )
    good, bad = WorkerQueue("good"), WorkerQueue("bad")
    for one in (good, bad):
        one.add(one.worker.begin(1))
        one.add(one.worker.store(SCOPE, bytes(8)))
    async with applying(index, good, bad, applier=applier):
        await until(lambda: good.queue.at_end and bad.queue.at_end, what="all messages are applied")
    assert await contents(index, "good") == good.worker.held
    assert refused == [(bad.queue.partition, 0), (bad.queue.partition, 1)]
    assert await index.position(bad.queue.partition) == Position(77, 102)


async def test_a_queue_fails_if_the_stored_position_is_of_another_stream() -> None:
    index = MemoryIndex()
    one = WorkerQueue("w0")
    async with applying(index, one) as applier:
        await index.set_position(one.queue.partition, START, Position(99, 0))
        one.add(one.worker.begin(1))
        applier.wake()
        await until(lambda: one.queue.failed.is_set(), what="the queue fails")
    assert await index.record("w0") is None


async def test_a_detached_queue_is_not_applied() -> None:
    index = MemoryIndex()
    gone, here = WorkerQueue("w0"), WorkerQueue("w1")
    async with applying(index, gone, here) as applier:
        applier.detach(gone.queue)
        for one in (gone, here):
            one.add(one.worker.begin(1))
        applier.wake()
        await until(lambda: here.queue.at_end and here.queue.received == 1, what="the other is applied")
    assert len(gone.queue) == 1
