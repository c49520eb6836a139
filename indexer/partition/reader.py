"""Reads one partition of the stream: an ephemeral consumer from the stored position, pulled without waiting.

If the consumer, the stream, the connection or a message is lost, the consumer is dropped with its queue, and another one
starts from the stored position: messages that come twice are duplicates for the fence.
"""

import logging
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from redis.exceptions import RedisError

from indexer.applier import Applier
from indexer.counters import IndexerCounters
from indexer.partition.admission import Admission
from indexer.partition.dead_letters import DeadLetters
from indexer.partition.event_stream import EventStream
from indexer.partition.pull_consumer import SILENCE_S, PullConsumer
from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.stream import StreamInfo, stream_info
from kvatlas.bus.subjects import STREAM, partition_events
from kvatlas.errors import KvatlasError
from kvatlas.fleet.identities import Identities
from kvatlas.index.protocol import Position, ResidencyIndex
from kvatlas.runtime.backoff import Backoff

INACTIVE_THRESHOLD_S = 30
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
WATCH_S = 0.5
CLOSE_DEADLINE_S = 1.0

log = logging.getLogger("kvatlas.indexer")


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One owned partition. `pending`: messages of it that are not applied; `lag_us`: age of the last applied message,
    None before the first; `at_end`: no message is known to be missing."""

    partition: int
    pending: int
    lag_us: int | None
    applied_seq: int | None
    at_end: bool


class PartitionReader:
    """Reads one partition into its shard's applier while `run` runs."""

    def __init__(
        self,
        partition: int,
        *,
        client: Client,
        stream: EventStream,
        index: ResidencyIndex,
        applier: Applier,
        dead_letters: DeadLetters,
        counters: IndexerCounters,
        identities: Identities | None = None,
    ) -> None:
        """`identities`: what each worker's publisher may speak for; None: everything."""
        self.partition = partition
        self._client = client
        self._stream = stream
        self._index = index
        self._applier = applier
        self._dead_letters = dead_letters
        self._counters = counters
        self._admission = Admission(partition, index.partitions, identities)
        self._consumer: PullConsumer | None = None
        """None between two consumers."""

    @property
    def reading(self) -> bool:
        """Has it a consumer now?"""
        return self._consumer is not None

    @property
    def at_end(self) -> bool:
        """Is all that the stream has of the partition applied, and has the server confirmed that lately?"""
        consumer = self._consumer
        return (
            consumer is not None
            and consumer.queue.at_end
            and not consumer.queue.failed.is_set()
            and not consumer.silent
        )

    def status(self, now_us: int) -> PartitionStatus:
        if self._consumer is None:
            return PartitionStatus(self.partition, 0, None, None, False)
        queue = self._consumer.queue
        lag_us = now_us - queue.applied_ts_us if queue.applied_ts_us is not None else None
        return PartitionStatus(self.partition, queue.pending + len(queue), lag_us, queue.applied_seq, self.at_end)

    def restart(self, why: str) -> None:
        """Drop the consumer and read again from the stored position; `why` is for the log."""
        if self._consumer is not None:
            self._consumer.queue.fail(why)

    async def run(self) -> None:
        """Read until cancelled. After an error of NATS or of the store another consumer is tried, with back-off."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        why = ""
        while True:
            began_s = monotonic()
            error = ""
            try:
                why = await self._read(why)
            except (NatsError, TimeoutError, KvatlasError, RedisError) as raised:
                why = error = str(raised) or type(raised).__name__
            self._counters.readings_broken += 1
            if monotonic() - began_s > LONGEST_PAUSE_S:
                backoff.reset()
            pause_s = backoff.next_s()
            if error:
                log.info("partition %d: not reading (%s), retrying in %g s", self.partition, error, pause_s)
            await anyio.sleep(pause_s)

    async def _read(self, restarted_because: str) -> str:
        """Read with one consumer until it is lost; returns why. `restarted_because`: why the last one was lost."""
        position, new_stream = await start_position(self._index, self.partition, await self._stream.info())
        self._counters.new_streams += new_stream
        if restarted_because:
            log.info(
                "partition %d: restarting from stored position %d (%s)", self.partition, position.seq, restarted_because
            )
        name = f"kva-{self.partition}-{token_hex(6)}"
        info = await self._client.jetstream().add_consumer(
            STREAM,
            ConsumerConfig(
                name=name,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=position.seq + 1,
                ack_policy=AckPolicy.NONE,
                filter_subject=partition_events(self.partition),
                inactive_threshold=INACTIVE_THRESHOLD_S,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        consumer = PullConsumer(
            name,
            position,
            info.num_pending or 0,
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
                return "the stream was made again"
            subscription = await self._client.subscribe(consumer.inbox, cb=consumer.on_message)
            self._applier.attach(consumer.queue)
            self._consumer = consumer
            self._counters.readings_started += 1
            await consumer.pull()
            return await self._watch(consumer, reconnects)
        finally:
            self._consumer = None
            self._applier.detach(consumer.queue)
            await self._close(name, subscription)

    async def _watch(self, consumer: PullConsumer, reconnects: int) -> str:
        """Wait until the consumer is lost; returns why."""
        while True:
            with anyio.move_on_after(WATCH_S):
                await consumer.queue.failed.wait()
                return consumer.queue.failure
            if self._client.stats["reconnects"] != reconnects or not self._client.is_connected:
                return "NATS connection lost"
            if consumer.silent:
                return f"consumer silent for {SILENCE_S:g} s"

    async def _close(self, consumer: str, subscription: Subscription | None) -> None:
        """Delete the consumer; if that fails, the server deletes it after the inactive threshold."""
        try:
            if subscription is not None:
                await unsubscribe(subscription, self._client)
            with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                if self._client.is_connected:
                    await self._client.publish(f"$JS.API.CONSUMER.DELETE.{STREAM}.{consumer}", b"")
        except NatsError as error:
            log.debug("consumer %s not deleted (%s), left to its inactive threshold", consumer, error)


async def start_position(index: ResidencyIndex, partition: int, stream: StreamInfo) -> tuple[Position, bool]:
    """The position to read after, as it is stored then; True if it is the beginning of another stream than before.

    A store without a position knows no worker: reading starts at the stream's end, and heartbeats make the workers
    doubted. Raises KvatlasError if another owner moved the position meanwhile.
    """
    stored = await index.position(partition)
    if stored is None:
        wanted, new = Position(stream.creation_us, stream.last_seq), False
    elif stored.creation_us != stream.creation_us or stored.seq > stream.last_seq:
        wanted, new = Position(stream.creation_us, max(0, stream.first_seq - 1)), True  # an empty stream begins at 0
    else:
        return stored, False
    now = await index.set_position(partition, stored, wanted)
    if now is None or now.creation_us != stream.creation_us:
        raise KvatlasError("the stored position was moved meanwhile")
    return now, new
