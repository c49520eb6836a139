"""One shard's applier over the memory index, fed by hand."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from indexer.applier import CALL_BYTES, Applier
from indexer.counters import IndexerCounters
from indexer.partition.queue import PartitionFeed
from kvatlas.bus.wire import RawMessage
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope, partition_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult, PartitionBatch, Position
from tests.eventually import until
from tests.kvatlas.index.message_source import MessageSource, contents

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
START = Position(77, 100)


class Fed:
    """A feed of one worker's partition, and its worker."""

    def __init__(self, worker_id: str) -> None:
        self.worker = MessageSource(worker_id)
        self.feed = PartitionFeed(partition_of(worker_id, 64), START, 0)
        self.count = 0

    def add(self, raw: RawMessage, size_bytes: int = 100) -> None:
        self.count += 1
        self.feed.add((raw, size_bytes, f"$JS.ACK.S.C.1.{100 + self.count}.{self.count}.0.0", None))


@asynccontextmanager
async def applying(index: MemoryIndex, *fed: Fed, applier: Applier | None = None) -> AsyncIterator[Applier]:
    applier = applier or Applier(0, index, IndexerCounters())
    for one in fed:
        await index.set_position(one.feed.partition, None, START)
        applier.attach(one.feed)
    async with anyio.create_task_group() as group:
        group.start_soon(applier.run)
        yield applier
        group.cancel_scope.cancel()


async def test_one_call_carries_messages_of_several_partitions() -> None:
    calls: list[int] = []

    class Recording(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            calls.append(len(batches))
            return await super().apply(shard, batches)

    index = Recording()
    fed = [Fed(f"w{i}") for i in range(3)]
    for one in fed:
        one.add(one.worker.begin(1))
    async with applying(index, *fed):
        await until(lambda: all(one.feed.at_end for one in fed), what="all is applied")
    assert calls == [3]


async def test_a_call_is_bounded_in_bytes_and_every_partition_gets_its_turn() -> None:
    order: list[int] = []

    class Recording(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            order.append(batches[0].partition)
            assert sum(len(batch.messages) for batch in batches) <= 2
            return await super().apply(shard, batches)

    index = Recording()
    fed = [Fed(f"w{i}") for i in range(3)]
    for one in fed:
        one.add(one.worker.begin(1), CALL_BYTES // 2)
        for number in range(5):
            one.add(one.worker.store(SCOPE, number.to_bytes(8, "little")), CALL_BYTES // 2)
    async with applying(index, *fed):
        await until(lambda: all(one.feed.at_end for one in fed), what="all is applied")
    assert set(order[:3]) == {one.feed.partition for one in fed}


async def test_a_message_that_the_index_refuses_does_not_stop_the_others() -> None:
    refused: list[tuple[int, int]] = []

    class Choosy(MemoryIndex):
        async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
            if any(raw[1] == "bad" for batch in batches for raw in batch.messages):
                raise InvalidValue("scope id of another scope")
            return await super().apply(shard, batches)

    index = Choosy()
    applier = Applier(
        0, index, IndexerCounters(), on_refused=lambda partition, raw, _: refused.append((partition, raw[3]))
    )
    good, bad = Fed("good"), Fed("bad")
    for one in (good, bad):
        one.add(one.worker.begin(1))
        one.add(one.worker.store(SCOPE, bytes(8)))
    async with applying(index, good, bad, applier=applier):
        await until(lambda: good.feed.at_end and bad.feed.at_end, what="all is applied")
    assert await contents(index, "good") == good.worker.held
    assert refused == [(bad.feed.partition, 0), (bad.feed.partition, 1)]
    assert await index.position(bad.feed.partition) == Position(77, 102)


async def test_a_partition_whose_position_is_of_another_stream_is_read_anew() -> None:
    index = MemoryIndex()
    one = Fed("w0")
    async with applying(index, one) as applier:
        await index.set_position(one.feed.partition, START, Position(99, 0))
        one.add(one.worker.begin(1))
        applier.wake()
        await until(lambda: one.feed.broken.is_set(), what="the feed is given up")
    assert await index.record("w0") is None


async def test_nothing_more_is_taken_from_a_detached_feed() -> None:
    index = MemoryIndex()
    gone, here = Fed("w0"), Fed("w1")
    async with applying(index, gone, here) as applier:
        applier.detach(gone.feed)
        for one in (gone, here):
            one.add(one.worker.begin(1))
        applier.wake()
        await until(lambda: here.feed.at_end and here.feed.received == 1, what="the other is applied")
    assert len(gone.feed) == 1
