"""One shard's way into the index: whatever its partitions have queued goes in one call, the next one right after it.

No linger: an idle shard applies a message at once; while a call is on its way more messages gather, so that calls grow
by themselves under load, up to a limit that keeps one call short (others wait for the store meanwhile).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time_ns

import anyio
from redis.exceptions import OutOfMemoryError, RedisError

from indexer.counters import IndexerCounters
from indexer.partition.queue import PartitionFeed, Taken
from kvatlas.bus.wire import RawMessage
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.index.protocol import ApplyResult, PartitionBatch, Position, ResidencyIndex
from kvatlas.telemetry import LinkCollector, apply_span, current_traceparent

CALL_MESSAGES = 512
CALL_BYTES = 64 * 1024
"""About 8,000 blocks: some 10 ms of the store, during which it answers nobody else."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
SAY_EVERY_S = 10.0

log = logging.getLogger("kvatlas.indexer")


class Applier:
    """Applies what the feeds of one shard's partitions queue; one call to the index at a time, in each feed's order."""

    def __init__(
        self,
        shard: int,
        index: ResidencyIndex,
        counters: IndexerCounters,
        *,
        on_applied: Callable[[ApplyResult, Mapping[str, str]], None] | None = None,
        on_refused: Callable[[int, RawMessage, InvalidValue], None] | None = None,
    ) -> None:
        """`on_applied` gets each call's outcome, and its span's W3C traceparent for each worker that it applied a traced
        batch of (not for one that only told a checkpoint); `on_refused` a partition and its message that the index refuses
        for ever."""
        self.shard = shard
        self._index = index
        self._counters = counters
        self._on_applied = on_applied
        self._on_refused = on_refused
        self._feeds: list[PartitionFeed] = []
        self._turn = 0
        self._links = LinkCollector()
        self._say_full_s = 0.0
        self._some = asyncio.Event()
        self.wake: Callable[[], None] = self._some.set
        """Call it after a feed got something."""

    def attach(self, feed: PartitionFeed) -> None:
        self._feeds.append(feed)
        self.wake()

    def detach(self, feed: PartitionFeed) -> None:
        """Nothing more is taken from it; what is on its way may still be applied."""
        if feed in self._feeds:
            self._feeds.remove(feed)

    async def run(self) -> None:
        """Applies until cancelled. Errors of the store are waited out with the batch kept: applying it again is
        right."""
        while True:
            await self._some.wait()
            self._some.clear()
            while taken := self._take():
                for one in taken:
                    if one.made_room:
                        await one.feed.on_room()
                await self._apply(taken)

    def _take(self) -> list[Taken]:
        """Of every feed in turn what fits in one call."""
        feeds = self._feeds
        taken: list[Taken] = []
        messages, size = CALL_MESSAGES, CALL_BYTES
        for step in range(len(feeds)):
            feed = feeds[(self._turn + step) % len(feeds)]
            one = feed.take(messages, size) if len(feed) else None
            if one is None:
                continue
            taken.append(one)
            messages -= one.entries
            size -= one.size_bytes
            if messages <= 0 or size <= 0:
                self._turn += step  # it may have more, but the next feed comes first
                break
        self._turn += 1
        return taken

    async def _apply(self, taken: list[Taken]) -> None:
        for one in taken:
            for _, headers in one.traced:
                self._links.add(headers)
        messages = sum(len(one.batch.messages) for one in taken)
        with apply_span(self._links.take(), shard=self.shard, partitions=len(taken), messages=messages):
            outcomes = await self._call([one.batch for one in taken])
            traceparent = current_traceparent()
        for applied in outcomes:
            self._count(applied)
        moved = {partition for applied in outcomes for partition in applied.moved}
        now_us = time_ns() // 1_000
        for one in taken:
            if one.batch.partition in moved:
                one.feed.in_flight -= 1
                one.feed.fail("the stored position is of another stream")
                continue
            one.feed.applied(one.batch)
            if one.batch.messages:
                oldest_us = one.batch.messages[0][4]
                self._counters.event_lag.add((now_us - oldest_us) / 1_000, len(one.batch.messages))
        if self._on_applied is not None:
            traces = {} if traceparent is None else {worker: traceparent for one in taken for worker, _ in one.traced}
            for applied in outcomes:
                self._on_applied(applied, traces)

    async def _call(self, batches: Sequence[PartitionBatch]) -> list[ApplyResult]:
        try:
            return [await self._until_answered(batches)]
        except InvalidValue as error:
            log.warning("shard %d: a message is refused: %s", self.shard, error)
            return [applied for batch in batches for applied in await self._one_by_one(batch)]

    async def _one_by_one(self, batch: PartitionBatch) -> list[ApplyResult]:
        """Applies what can be applied of a batch, so that one message which the index refuses does not stop the rest."""
        assert batch.position is not None and batch.after_seq is not None
        before = Position(batch.position.creation_us, batch.after_seq)
        outcomes = []
        for message in batch.messages:
            try:
                alone = PartitionBatch(batch.partition, [message], before, batch.after_seq)
                outcomes.append(await self._until_answered([alone]))
            except InvalidValue as error:
                if self._on_refused is not None:
                    self._on_refused(batch.partition, message, error)
        passed = PartitionBatch(batch.partition, [], batch.position, batch.after_seq)
        return [*outcomes, await self._until_answered([passed])]

    async def _until_answered(self, batches: Sequence[PartitionBatch]) -> ApplyResult:
        """Raises InvalidValue where the index refuses a message; nothing is applied then."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._index.apply(self.shard, batches)
            except InvalidValue:
                raise
            except (KvatlasError, RedisError) as error:
                self._counters.store_errors += 1
                self._counters.store_full += isinstance(error, OutOfMemoryError)
                log.warning("shard %d is applied again in %g s: %s", self.shard, pause_s, error)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _count(self, applied: ApplyResult) -> None:
        counters = self._counters
        counters.calls += 1
        counters.applied += applied.applied
        counters.duplicates += applied.duplicates
        counters.stale += applied.stale
        counters.gaps += applied.gaps
        counters.refused += applied.refused
        counters.failed_checks += applied.failed_checks
        counters.moved += len(applied.moved)
        if applied.no_room:
            counters.store_full += 1
            if monotonic() >= self._say_full_s:
                self._say_full_s = monotonic() + SAY_EVERY_S
                closed = sum(record.oom for record in applied.records)
                log.error(
                    "shard %d: the store is out of memory (maxmemory): blocks of %d workers could not be stored, these are"
                    " left out until there is room",
                    self.shard,
                    closed,
                )
