"""Applies the event stream to a memory index, and knows how old that index can be.

One consumer reads all partitions. Now and then, we ask the server how far the consumer has got and how much is still ahead of
it. Once that much has been applied, the index has everything that was in the stream when we asked.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from secrets import token_hex
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.admission import Admission, PoisonMessage
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.pull_consumer import PullConsumer, open_pull_consumer
from kvatlas.bus.queue import EVERY_PARTITION, PartitionQueue
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, partition_of
from kvatlas.bus.wire import WORKER_ID, RawMessage
from kvatlas.identity import shard_of
from kvatlas.index.local_copy.counters import ReplicaCounters
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.runtime.background_task import end_tasks
from kvatlas.runtime.backoff import Backoff
from kvatlas.runtime.wakeup import Wakeup

SLICE_MESSAGES = 32
SLICE_BYTES = 16 * 1024
"""Limits of what is applied before other tasks get their turn: a few milliseconds of work."""
PROBE_TIMEOUT_S = 2.0
MOST_PROBES = 64
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
END_AGAIN_S = 0.1

log = logging.getLogger("kvatlas.replica")


class StreamFeed:
    """Feeds one memory index, from `start` on, for as long as `run` runs."""

    def __init__(
        self,
        client: Client,
        index: MemoryIndex,
        admission: Admission,
        start: Position,
        counters: ReplicaCounters,
        *,
        probe_s: float,
    ) -> None:
        """`probe_s`: the pause between two queries for the consumer's progress."""
        self.current_s = float("-inf")
        """Everything that was in the stream at this time, by the monotonic clock, has been applied."""
        self._client = client
        self._index = index
        self.position = start
        """Stream position of the last message applied."""
        self._counters = counters
        self._probe_s = probe_s
        self._admission = admission
        self._wakeup = Wakeup()
        self._goals: deque[tuple[int, float]] = deque(maxlen=MOST_PROBES)
        """(number of a consumer message, time): once that message has been applied, so has everything that was in the stream at
        that time."""

    async def run(self) -> None:
        """Apply messages until cancelled. If the consumer or the connection is lost, another consumer continues after the last
        message that was applied. Raises KvatlasError if the stream is a different one, or one of DATA_ERRORS if a message can't
        be applied."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            began_s = monotonic()
            try:
                why = await self._read()
            except (NatsError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            if monotonic() - began_s > LONGEST_PAUSE_S:
                backoff.reset()
            pause_s = backoff.next_s()
            log.info("replica: reading again from position %d in %g s (%s)", self.position.seq, pause_s, why)
            await anyio.sleep(pause_s)

    async def _read(self) -> str:
        """Read with one consumer until it is lost. Returns the reason."""
        name = f"kva-replica-{token_hex(6)}"

        def make(pending: int) -> PullConsumer:
            return PullConsumer(
                name,
                self.position,
                pending,
                partition=EVERY_PARTITION,
                client=self._client,
                admit=self._admit,
                on_queued=self._wakeup.wake,
                counters=self._counters,
            )

        async with open_pull_consumer(self._client, name, [ALL_EVENTS], self.position, make) as consumer:
            self._goals.clear()
            errors: list[BaseException] = []
            tasks = [asyncio.create_task(work, name=name) for work in (self._apply(consumer), self._probe(consumer))]
            for task in tasks:
                task.add_done_callback(lambda done: self._end(consumer, done, errors))
            try:
                await consumer.pull()
                why = await consumer.wait_until_lost()
            finally:
                await end_tasks(tasks, again_s=END_AGAIN_S)
            if errors:
                raise errors[0]
            return why

    @staticmethod
    def _end(consumer: PullConsumer, done: "asyncio.Task[None]", errors: list[BaseException]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            errors.append(error)
            consumer.queue.fail(str(error))

    def _admit(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> RawMessage | None:
        try:
            return self._admission.admit(subject, payload, headers)
        except PoisonMessage:
            self._counters.refused += 1
            return None

    async def _apply(self, consumer: PullConsumer) -> None:
        queue = consumer.queue
        while True:
            await self._wakeup.wait()
            while (part := queue.take(SLICE_MESSAGES, SLICE_BYTES)) is not None:
                if part.made_room:
                    await consumer.pull()
                await self._apply_messages(part.batch.messages)
                queue.record_applied(part.batch)
                assert part.batch.position is not None
                self.position = part.batch.position
                self._settle(queue)
                await asyncio.sleep(0)  # let requests be served between two slices

    async def _apply_messages(self, messages: Sequence[RawMessage]) -> None:
        index = self._index
        by_shard: dict[int, list[PartitionBatch]] = {}
        for raw in messages:
            partition = partition_of(raw[WORKER_ID], index.partitions)
            by_shard.setdefault(shard_of(partition, index.shards), []).append(PartitionBatch(partition, [raw]))
        for shard, batches in by_shard.items():
            await index.apply(shard, batches)

    async def _probe(self, consumer: PullConsumer) -> None:
        jetstream = self._client.jetstream()
        while True:
            asked_s = monotonic()
            try:
                info = await jetstream.consumer_info(STREAM, consumer.name, timeout=PROBE_TIMEOUT_S)
            except (NatsError, TimeoutError) as error:  # the loss of a consumer is noticed elsewhere
                log.debug("replica: no answer about its consumer: %s", error)
            else:
                delivered = info.delivered.consumer_seq if info.delivered is not None else 0
                self._goals.append((delivered + (info.num_pending or 0), asked_s))
                self._settle(consumer.queue)
            await anyio.sleep(self._probe_s)

    def _settle(self, queue: PartitionQueue) -> None:
        """Update `current_s` according to the goals that have been reached."""
        applied = queue.received - len(queue)
        while self._goals and self._goals[0][0] <= applied:
            _, self.current_s = self._goals.popleft()
