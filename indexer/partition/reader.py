"""Reads one partition of the stream: an ephemeral consumer from the stored position, pulled without waiting.

A reading that is in any doubt (the consumer, the stream, the connection or a message gone) is given up, and another
begins from the stored position: what comes twice is a duplicate for the fence.
"""

import logging
from collections.abc import Awaitable, Callable
from secrets import token_hex
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError
from redis.exceptions import RedisError

from indexer.applier import Applier
from indexer.counters import IndexerCounters
from indexer.partition.admission import Admission
from indexer.partition.dead_letters import DeadLetters
from indexer.partition.pull_consumer import Reading
from indexer.partition.queue import PartitionFeed
from indexer.partition.start_position import start_position
from kvatlas.bus.stream import StreamInfo, stream_info
from kvatlas.bus.subjects import STREAM, partition_events
from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import Position, ResidencyIndex

INACTIVE_THRESHOLD_S = 30
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
WATCH_S = 0.5

log = logging.getLogger("kvatlas.indexer")


class PartitionReader:
    """Feeds one partition into its shard's applier for as long as `run` runs."""

    def __init__(
        self,
        partition: int,
        *,
        client: Client,
        index: ResidencyIndex,
        applier: Applier,
        dead_letters: DeadLetters,
        counters: IndexerCounters,
        ensure_stream: Callable[[], Awaitable[None]],
    ) -> None:
        """`ensure_stream` makes the event stream again where it is gone."""
        self.partition = partition
        self._client = client
        self._index = index
        self._applier = applier
        self._dead_letters = dead_letters
        self._counters = counters
        self._ensure_stream = ensure_stream
        self._admission = Admission(partition, index.partitions)
        self._reading: Reading | None = None

    @property
    def feed(self) -> PartitionFeed | None:
        """The reading that goes on now; None between two."""
        return self._reading.feed if self._reading is not None else None

    @property
    def at_end(self) -> bool:
        """Is all that the stream has of the partition applied, and has the server confirmed that lately?"""
        reading = self._reading
        return reading is not None and reading.feed.at_end and not reading.feed.broken.is_set() and not reading.silent

    async def run(self) -> None:
        """Reads until cancelled. Errors of NATS and of the store are waited out, with back-off."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = monotonic()
            try:
                why = await self._read_once()
            except (NatsError, TimeoutError, KvatlasError, RedisError) as error:
                why = str(error) or type(error).__name__
            self._counters.readings_broken += 1
            log.info("partition %d is read anew from its stored position: %s", self.partition, why)
            if monotonic() - began_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read_once(self) -> str:
        """One reading; returns why it is over."""
        position = await self._start()
        consumer = f"kva-{self.partition}-{token_hex(6)}"
        info = await self._client.jetstream().add_consumer(
            STREAM,
            ConsumerConfig(
                name=consumer,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=position.seq + 1,
                ack_policy=AckPolicy.NONE,
                filter_subject=partition_events(self.partition),
                inactive_threshold=INACTIVE_THRESHOLD_S,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        feed = PartitionFeed(self.partition, position, info.num_pending or 0)
        reading = Reading(
            consumer,
            feed,
            client=self._client,
            admission=self._admission,
            applier=self._applier,
            dead_letters=self._dead_letters,
            counters=self._counters,
        )
        reconnects = self._client.stats["reconnects"]
        subscription: Subscription | None = None
        try:
            if (await stream_info(self._client)).creation_us != position.creation_us:
                return "the stream is another one now"
            subscription = await self._client.subscribe(reading.inbox, cb=reading.on_message)
            self._applier.attach(feed)
            self._reading = reading
            self._counters.readings_started += 1
            await reading.pull()
            return await self._watch(reading, reconnects)
        finally:
            self._reading = None
            self._applier.detach(feed)
            with anyio.CancelScope(shield=True):
                await self._end(consumer, subscription)

    async def _start(self) -> Position:
        """The position to read after, as it is stored now."""
        position, new = await start_position(self._index, self.partition, await self._stream())
        self._counters.new_streams += new
        return position

    async def _stream(self) -> StreamInfo:
        try:
            return await stream_info(self._client)
        except NotFoundError:
            await self._ensure_stream()
            return await stream_info(self._client)

    async def _watch(self, reading: Reading, reconnects: int) -> str:
        while True:
            with anyio.move_on_after(WATCH_S):
                await reading.feed.broken.wait()
                return reading.feed.broken_why
            if self._client.stats["reconnects"] != reconnects or not self._client.is_connected:
                return "the connection to NATS broke"
            if reading.silent:
                return "the consumer fell silent"

    async def _end(self, consumer: str, subscription: Subscription | None) -> None:
        """Gives the server back what the reading used; where that fails, it forgets it by itself (inactive
        threshold)."""
        try:
            with anyio.move_on_after(1):
                if subscription is not None:
                    await subscription.unsubscribe()
                if self._client.is_connected:
                    await self._client.publish(f"$JS.API.CONSUMER.DELETE.{STREAM}.{consumer}", b"")
        except NatsError as error:
            log.debug("consumer %s is left to its inactive threshold: %s", consumer, error)
