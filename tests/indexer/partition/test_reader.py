"""Readers of every partition of a real stream, with one applier over the memory index."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import TaskGroup
from nats.aio.client import Client

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.bus.subjects import DEAD_REASON, DEAD_STREAM, STREAM, partition_of
from kvatlas.bus.wire import MAX_MESSAGE_BYTES
from kvatlas.embedded import EmbeddedServer
from kvatlas.errors import Unreachable
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult
from kvatlas_indexer.applier import CALL_MESSAGES, Applier
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.partition.dead_letters import DeadLetters
from kvatlas_indexer.partition.event_stream import EventStream
from kvatlas_indexer.partition.reader import PartitionReader
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, has_applied_all, indexed, published
from tests.indexer.conftest import STREAM as STREAM_SETTINGS

pytestmark = pytest.mark.anyio


@dataclass
class RunningReaders:
    """Readers of all partitions with one applier."""

    index: MemoryIndex
    counters: IndexerCounters
    readers: list[PartitionReader]
    group: TaskGroup

    @property
    def at_end(self) -> bool:
        return all(reader.at_end for reader in self.readers)

    async def applies_all_of(self, *publishers: BusPublisher) -> None:
        """Wait until everything that they have published is applied, then compare."""
        await until(lambda: has_applied_all(self.index, *publishers), what="every message is applied")
        assert await indexed(self.index, *publishers) == published(*publishers)


@asynccontextmanager
async def running_readers(nats_client: Client, index: MemoryIndex | None = None) -> AsyncIterator[RunningReaders]:
    index = index or MemoryIndex(partitions=PARTITIONS)
    counters = IndexerCounters()
    dead_letters = DeadLetters(nats_client, counters, storage="memory")
    applier = Applier(0, index, counters)
    stream = EventStream(nats_client, STREAM_SETTINGS)
    readers = [
        PartitionReader(
            partition,
            client=nats_client,
            stream=stream,
            index=index,
            applier=applier,
            dead_letters=dead_letters,
            counters=counters,
        )
        for partition in range(PARTITIONS)
    ]
    async with anyio.create_task_group() as group:
        group.start_soon(applier.run)
        group.start_soon(dead_letters.run)
        for reader in readers:
            group.start_soon(reader.run)
        await until(lambda: all(reader.reading for reader in readers), what="every partition is read")
        yield RunningReaders(index, counters, readers, group)
        group.cancel_scope.cancel()


def publishers(nats_client: Client, count: int) -> list[BusPublisher]:
    return [BusPublisher(nats_client, f"worker-{number}") for number in range(count)]


async def test_every_message_is_applied_exactly_once(nats_client: Client) -> None:
    workers = publishers(nats_client, 12)
    async with running_readers(nats_client) as run:
        for worker in workers:
            await worker.start()
        for _ in range(10):
            for worker in workers:
                await worker.store_more()
        for worker in workers[::2]:
            held = next(iter(worker.held))
            await worker.send(worker.remove(*held))
        await run.applies_all_of(*workers)
        await until(lambda: run.at_end, what="every partition is read to its end")
    sent = sum(len(worker.sent) for worker in workers)
    assert (run.counters.applied, run.counters.duplicates, run.counters.gaps) == (sent, 0, 0)
    assert run.counters.event_lag.count == sent


async def test_messages_that_come_twice_change_nothing(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    async with running_readers(nats_client) as run:
        await worker.start()
        await worker.store_more()
        await worker.store_more()
        for payload in list(worker.sent):
            await worker.publish(payload)
        await worker.store_more()
        await run.applies_all_of(worker)
    assert (run.counters.applied, run.counters.duplicates) == (4, 3)


async def test_a_reader_starts_from_the_stored_position(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    index = MemoryIndex(partitions=PARTITIONS)
    async with running_readers(nats_client, index) as first:
        await worker.start()
        await worker.store_more()
        await first.applies_all_of(worker)
    await worker.store_more()
    async with running_readers(nats_client, index) as second:
        await second.applies_all_of(worker)
    assert (second.counters.messages_read, second.counters.duplicates) == (1, 0)


async def test_without_a_stored_position_a_reader_starts_at_the_streams_end(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    await worker.start()
    await worker.store_more()
    async with running_readers(nats_client) as run:
        assert run.at_end
        await worker.start(incarnation=2)
        await run.applies_all_of(worker)
    assert run.counters.messages_read == 1


async def test_a_stream_that_was_made_again_is_read_from_its_beginning_and_its_workers_are_doubted(
    nats_client: Client,
) -> None:
    (worker,) = publishers(nats_client, 1)
    async with running_readers(nats_client) as run:
        await worker.start()
        await worker.store_more()
        await run.applies_all_of(worker)
        before = await stream_info(nats_client)
        await nats_client.jetstream().delete_stream(STREAM)
        await ensure_stream(nats_client, STREAM_SETTINGS)
        await worker.store_more()
        await run.applies_all_of(worker)
        record = await run.index.record(worker.worker_id)
        assert record is not None and record.bad
        position = await run.index.position(record.partition)
        assert position is not None and position.creation_us > before.creation_us
    assert run.counters.new_streams >= 1


async def test_a_deleted_stream_is_made_again(nats_client: Client) -> None:
    async with running_readers(nats_client) as run:
        await nats_client.jetstream().delete_stream(STREAM)
        await until(lambda: run.counters.new_streams >= PARTITIONS, what="the new stream is read")
        (worker,) = publishers(nats_client, 1)
        await worker.start()
        await run.applies_all_of(worker)


async def test_a_stream_that_lost_its_last_messages_is_read_from_its_beginning(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    partition = partition_of(worker.worker_id, PARTITIONS)
    index = MemoryIndex(partitions=PARTITIONS)
    await worker.start()
    stream = await stream_info(nats_client)
    await index.set_position(partition, None, Position(stream.creation_us, stream.last_seq + 1_000))
    async with running_readers(nats_client, index) as run:
        await run.applies_all_of(worker)
    assert run.counters.new_streams == 1


async def test_a_deleted_consumer_is_replaced(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    jetstream = nats_client.jetstream()
    async with running_readers(nats_client) as run:
        await worker.start()
        await run.applies_all_of(worker)
        for consumer in await jetstream.consumers_info(STREAM):
            await jetstream.delete_consumer(STREAM, consumer.name)
        await worker.store_more()
        await run.applies_all_of(worker)
        await until(lambda: run.at_end, what="every partition is read again")


async def test_readers_continue_after_nats_was_killed(nats: EmbeddedServer) -> None:
    nats_client = await connect_nats(nats.url, name="test", wait=False)
    try:
        await ensure_stream(nats_client, StreamSettings(storage="file", max_bytes=64 << 20))
        (worker,) = publishers(nats_client, 1)
        async with running_readers(nats_client) as run:
            await worker.start()
            await run.applies_all_of(worker)
            await nats.kill()
            await nats.start()
            await until(
                lambda: nats_client.is_connected and run.counters.readings_broken >= 1,
                deadline_s=15,
                what="the readers have restarted",
            )
            await worker.store_more()
            await run.applies_all_of(worker)
    finally:
        await nats_client.close()


async def test_consumers_are_deleted_at_the_end(nats_client: Client) -> None:
    async with running_readers(nats_client) as run:
        assert len(run.readers) == PARTITIONS
        assert (await nats_client.jetstream().stream_info(STREAM)).state.consumer_count == PARTITIONS

    async def consumers() -> int:
        return (await nats_client.jetstream().stream_info(STREAM)).state.consumer_count

    async def none_left() -> bool:
        return await consumers() == 0

    await until(none_left, what="no consumer is left")


async def test_poison_is_counted_and_kept_and_stops_nothing(nats_client: Client) -> None:
    worker, other = publishers(nats_client, 2)
    async with running_readers(nats_client) as run:
        await worker.start()
        await worker.publish(b"garbage")
        await worker.publish(b"")
        await other.publish(worker.sent[0])
        wrong_version = b"\x97\x09" + worker.sent[0][2:]
        await worker.publish(wrong_version)
        await worker.store_more()
        await run.applies_all_of(worker)
        await until(lambda: run.at_end, what="the partitions are read to their end")
        counters = run.counters
        assert counters.poison_malformed == 2
        assert counters.poison_wrong_subject == 1
        assert counters.poison_version == 1
        assert counters.applied == 2

        async def kept() -> bool:
            return (await nats_client.jetstream().stream_info(DEAD_STREAM)).state.messages == 4

        await until(lambda: nats_client.is_connected and counters.poison == 4, what="all poison is counted")
        await until(kept, what="dead letters are kept")
        letter = await nats_client.jetstream().get_msg(DEAD_STREAM, 1)
        assert letter.data == b"garbage"
        assert letter.headers is not None and letter.headers[DEAD_REASON] == "malformed"
        partition = partition_of(worker.worker_id, PARTITIONS)
        position = await run.index.position(partition)
        assert position is not None and position.seq == (await stream_info(nats_client)).last_seq


async def test_the_position_moves_past_a_poison_message(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    async with running_readers(nats_client) as run:
        await worker.publish(b"garbage")
        partition = partition_of(worker.worker_id, PARTITIONS)

        async def passed() -> bool:
            position = await run.index.position(partition)
            return position is not None and position.seq == 1

        await until(passed, what="the position moves past the poison message")


class FailingIndex(MemoryIndex):
    """A memory index whose store fails in one of three calls, and loses its answer in another."""

    def __init__(self) -> None:
        super().__init__(partitions=PARTITIONS)
        self.calls = 0

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        self.calls += 1
        if self.calls % 3 == 1:
            raise Unreachable("the store is away")
        applied = await super().apply(shard, batches)
        if self.calls % 3 == 2:
            raise Unreachable("the answer is lost")
        return applied


async def test_nothing_is_lost_or_applied_twice_while_the_store_fails(nats_client: Client) -> None:
    workers = publishers(nats_client, 3)
    index = FailingIndex()
    async with running_readers(nats_client, index) as run:
        for worker in workers:
            await worker.start()
        for _ in range(5):
            for worker in workers:
                await worker.store_more()
        await run.applies_all_of(*workers)
    assert run.counters.store_errors > 0
    assert run.counters.gaps == 0


class RecordingIndex(MemoryIndex):
    """A memory index that remembers how many messages each call carried."""

    def __init__(self) -> None:
        super().__init__(partitions=PARTITIONS)
        self.calls: list[int] = []

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        self.calls.append(sum(len(batch.messages) for batch in batches))
        return await super().apply(shard, batches)


async def test_a_backlog_is_applied_completely_in_large_calls(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    index = RecordingIndex()
    async with running_readers(nats_client, index):
        pass  # stores positions, so that the backlog is read
    await worker.start()
    await worker.store_many(3_000)
    async with running_readers(nats_client, index) as run:
        await run.applies_all_of(worker)
    assert sum(index.calls) == 3_001
    assert 1 < max(index.calls) <= CALL_MESSAGES
    assert len(index.calls) < 300


async def test_messages_of_the_largest_size_are_applied(nats_client: Client) -> None:
    (worker,) = publishers(nats_client, 1)
    blocks = (MAX_MESSAGE_BYTES - 1_000) // HASH_BYTES
    async with running_readers(nats_client) as run:
        await worker.start()
        for _ in range(4):
            await worker.store_more(blocks)
        await until(lambda: has_applied_all(run.index, worker), what="every message is applied")
        assert await run.index.length() == 4 * blocks
