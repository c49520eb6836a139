"""Reads one partition of the stream through an ephemeral consumer, which starts at the stored position and is pulled without
waiting.

If the consumer, the stream, the connection or a message is lost, the consumer is dropped with its queue, and a new one starts
from the stored position. The fence drops messages that arrive twice as duplicates.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.bus.admission import Admission, PoisonMessage
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.pull_consumer import PullConsumer, open_pull_consumer
from kvatlas.bus.stream import StreamInfo
from kvatlas.bus.subjects import partition_events
from kvatlas.bus.wire import RawMessage
from kvatlas.errors import KvatlasError
from kvatlas.fleet.identities import Identities
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.runtime.backoff import Backoff
from kvatlas_indexer.applier import Applier
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.partition.dead_letters import DeadLetters
from kvatlas_indexer.partition.event_stream import EventStream

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

log = logging.getLogger("kvatlas.indexer")


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One owned partition. `pending`: how many of its messages have not been applied yet; `lag_us`: the age of the last applied
    message, None before the first; `at_end`: no message is known to be missing."""

    partition: int
    pending: int
    lag_us: int | None
    applied_seq: int | None
    at_end: bool


class PartitionReader:
    """Reads one partition into its shard's applier for as long as `run` runs."""

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
        publishers: Sequence[int] = (),
        fleet_id: str | None = None,
    ) -> None:
        """`identities`: what each worker's publisher may speak for; None: everything. `publishers`: other partition counts
        that publishers may use. `fleet_id`: see `Admission`."""
        self.partition = partition
        self._client = client
        self._stream = stream
        self._index = index
        self._applier = applier
        self._dead_letters = dead_letters
        self._counters = counters
        self._admission = Admission(partition, index.partitions, identities, publishers, fleet_id)
        self._filters = partition_events(partition, index.partitions, publishers)
        self._consumer: PullConsumer | None = None
        """None between two consumers."""

    @property
    def reading(self) -> bool:
        """True if there is a consumer at the moment."""
        return self._consumer is not None

    @property
    def at_end(self) -> bool:
        """True if everything that the stream holds for the partition has been applied, and the server has recently confirmed
        that."""
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
        """Drop the consumer and read again from the stored position; `why` is logged."""
        if self._consumer is not None:
            self._consumer.queue.fail(why)

    async def run(self) -> None:
        """Read until cancelled. After an error from NATS or the store, another consumer is tried, with back-off."""
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
        """Read through one consumer until it is lost, and return the reason. `restarted_because`: why the previous one was
        lost."""
        position, new_stream = await start_position(self._index, self.partition, await self._stream.info())
        self._counters.new_streams += new_stream
        if restarted_because:
            log.info(
                "partition %d: restarting from stored position %d (%s)", self.partition, position.seq, restarted_because
            )
        name = f"kva-{self.partition}-{token_hex(6)}"

        def make(pending: int) -> PullConsumer:
            return PullConsumer(
                name,
                position,
                pending,
                partition=self.partition,
                client=self._client,
                admit=self._admit,
                on_queued=self._applier.wake,
                counters=self._counters,
            )

        async with open_pull_consumer(self._client, name, self._filters, position, make) as consumer:
            try:
                self._applier.attach(consumer.queue)
                self._consumer = consumer
                self._counters.readings_started += 1
                await consumer.pull()
                return await consumer.wait_until_lost()
            finally:
                self._consumer = None
                self._applier.detach(consumer.queue)

    def _admit(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> RawMessage | None:
        try:
            return self._admission.admit(subject, payload, headers)
        except PoisonMessage as poison:
            self._dead_letters.put(self.partition, subject, payload, poison)
            return None


async def start_position(index: ResidencyIndex, partition: int, stream: StreamInfo) -> tuple[Position, bool]:
    """The position after which to read, and True if that is the beginning of a new stream. The position is stored from then on.

    A store without a position knows no workers: reading starts at the stream's end, and heartbeats put the workers in doubt.
    Raises KvatlasError if another owner has moved the position in the meantime.
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
        raise KvatlasError("the stored position was moved in the meantime")
    return now, new
