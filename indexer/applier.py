"""Applies one shard's messages to the index: each call carries whatever the shard's partitions have queued, and the next call
follows immediately.

There is no linger time: an idle shard applies a message immediately. More messages gather while a call is under way, so calls
grow automatically under load, up to a limit that keeps each call short (other clients wait for the store in the meantime).

Partitions with long queues, typically snapshots, have a lane of their own: the store applies a snapshot message in a hundred
parts or more, and without it the messages of other partitions would have to wait for all of them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, time_ns

import anyio
from redis.exceptions import OutOfMemoryError, RedisError

from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.queue import CallPart, PartitionQueue
from kvatlas.bus.wire import INCARNATION, TS_US, WORKER_ID, RawMessage
from kvatlas.errors import DATA_ERRORS, InvalidValue, KvatlasError
from kvatlas.index.protocol import ApplyResult, ResidencyIndex
from kvatlas.runtime.backoff import Backoff
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.wakeup import Wakeup
from kvatlas.telemetry import LinkCollector, apply_span, current_traceparent, describe_batch, sampled_context
from kvatlas_indexer.counters import IndexerCounters

CALL_MESSAGES = 512
CALL_BYTES = 64 * 1024
"""Limits of one batch that is handed to the index, which cuts it into calls that occupy the store for a few milliseconds
each."""
LARGE_BYTES = 8 * 1024
"""Size from which a queue counts as large: about 1,000 blocks, which take two or three calls."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

log = logging.getLogger("kvatlas.indexer")


class Applier:
    """Applies the queued messages of one shard's partitions, in each queue's order. One call to the index at a time serves the
    small queues, and one serves the large ones; a queue is never in both calls at the same time."""

    def __init__(
        self,
        shard: int,
        index: ResidencyIndex,
        counters: IndexerCounters,
        *,
        on_applied: Callable[[ApplyResult, Mapping[str, str]], None] | None = None,
        on_refused: Callable[[int, RawMessage, Exception], None] | None = None,
    ) -> None:
        """`on_applied` gets each call's outcome and, for each worker with a traced message in the call, the W3C traceparent of
        the call's span (a checkpoint has no trace). `on_refused` gets the partition, the message and the error if the index can
        never apply a message."""
        self.shard = shard
        self._index = index
        self._counters = counters
        self._on_applied = on_applied
        self._on_refused = on_refused
        self._queues: list[PartitionQueue] = []
        self._turn = 0
        self._links = LinkCollector()
        self._errors = RateLimitedLog(log, f"shard {shard}: ")
        self._small, self._large = Wakeup(), Wakeup()
        self.wake: Callable[[], None] = self._small.wake
        """To be called when a message enters an empty queue."""

    def attach(self, queue: PartitionQueue) -> None:
        self._queues.append(queue)
        self.wake()

    def detach(self, queue: PartitionQueue) -> None:
        """Take nothing more from the queue; the messages of a call that is under way may still be applied."""
        if queue in self._queues:
            self._queues.remove(queue)

    async def run(self) -> None:
        """Apply messages until cancelled. If the store fails, the same call is repeated, because applying twice is safe."""
        async with anyio.create_task_group() as lanes:
            lanes.start_soon(self._run_lane, self._small)
            lanes.start_soon(self._run_lane, self._large)

    async def _run_lane(self, lane: Wakeup) -> None:
        while True:
            await lane.wait()
            while parts := self._take(lane):
                for part in parts:
                    if part.made_room and part.queue.on_room is not None:
                        await part.queue.on_room()
                await self._apply(parts)

    def _take(self, lane: Wakeup) -> list[CallPart]:
        """The lane's next call: as much as fits from each of its queues in turn. Wakes the other lane if that one has messages
        to take."""
        queues = self._queues
        parts: list[CallPart] = []
        messages, size = CALL_MESSAGES, CALL_BYTES
        for step in range(len(queues)):
            queue = queues[(self._turn + step) % len(queues)]
            if not len(queue) or queue.in_flight:
                continue
            queues_lane = self._large if queue.queued_bytes >= LARGE_BYTES else self._small
            if queues_lane is not lane:
                queues_lane.wake()
                continue
            part = queue.take(messages, size)
            if part is None:
                continue
            parts.append(part)
            messages -= part.entries
            size -= part.size_bytes
            if messages <= 0 or size <= 0:
                self._turn += step  # this queue may have more, but the next queue comes first
                break
        self._turn += 1
        return parts

    async def _apply(self, parts: list[CallPart]) -> None:
        for part in parts:
            for _, headers in part.traced:
                self._links.add(headers)
        messages = sum(len(part.batch.messages) for part in parts)
        with apply_span(self._links.take(), shard=self.shard, partitions=len(parts), messages=messages) as span:
            if span.is_recording():
                raw = (message for part in parts for message in part.batch.messages)
                describe_batch(span, Counter((message[WORKER_ID], message[INCARNATION]) for message in raw))
            began = perf_counter()
            outcomes = await self._apply_batches([part.batch for part in parts])
            sampled = sampled_context()
            self._counters.apply_time.add(perf_counter() - began, span=sampled)
            traceparent = current_traceparent()
        for applied in outcomes:
            self._count(applied)
        moved = {partition for applied in outcomes for partition in applied.moved}
        now_us = time_ns() // 1_000
        for part in parts:
            if part.batch.partition in moved:
                part.queue.fail_in_flight("the stored position belongs to another stream")
                continue
            part.queue.record_applied(part.batch)
            if part.batch.messages:
                oldest_us = part.batch.messages[0][TS_US]
                lag_s = (now_us - oldest_us) / 1e6
                self._counters.event_lag.add(lag_s, len(part.batch.messages), span=sampled)
        if self._on_applied is not None:
            traces = {} if traceparent is None else {worker: traceparent for part in parts for worker, _ in part.traced}
            for applied in outcomes:
                self._on_applied(applied, traces)

    async def _apply_batches(self, batches: Sequence[PartitionBatch]) -> list[ApplyResult]:
        try:
            return [await self._call(batches)]
        except DATA_ERRORS as error:
            log.warning("shard %d: the index refused a message (%r); applying each alone", self.shard, error)
            return [applied for batch in batches for applied in await self._apply_one_by_one(batch)]

    async def _apply_one_by_one(self, batch: PartitionBatch) -> list[ApplyResult]:
        """Apply all messages of a batch except those that the index refuses."""
        assert batch.position is not None and batch.after_seq is not None
        before = Position(batch.position.creation_us, batch.after_seq)
        outcomes = []
        for message in batch.messages:
            try:
                outcomes.append(await self._call([PartitionBatch(batch.partition, [message], before, batch.after_seq)]))
            except DATA_ERRORS as error:
                if self._on_refused is not None:
                    self._on_refused(batch.partition, message, error)
        position_only = PartitionBatch(batch.partition, [], batch.position, batch.after_seq)
        return [*outcomes, await self._call([position_only])]

    async def _call(self, batches: Sequence[PartitionBatch]) -> ApplyResult:
        """Make one call to the index and repeat it until it succeeds. Raises one of DATA_ERRORS if the index refuses a message;
        in that case, nothing is applied."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                return await self._index.apply(self.shard, batches)
            except InvalidValue:
                raise
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                self._counters.store_full += isinstance(error, OutOfMemoryError)
                pause_s = backoff.next_s()
                log.warning("shard %d: apply failed (%s), retrying in %g s", self.shard, error, pause_s)
            await anyio.sleep(pause_s)

    def _count(self, applied: ApplyResult) -> None:
        counters = self._counters
        counters.applied += applied.applied
        counters.duplicates += applied.duplicates
        counters.stale += applied.stale
        counters.gaps += applied.gaps
        counters.refused += applied.refused
        counters.failed_checks += applied.failed_checks
        counters.moved += len(applied.moved)
        if applied.no_room:
            counters.store_full += 1
            closed = sum(record.oom for record in applied.records)
            line = f"the store is out of memory (maxmemory); {closed} workers are left out of the index until there is room"
            self._errors.report("out of memory", line, logging.ERROR)
