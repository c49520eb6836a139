"""One unbroken reading of one partition: what the reader has taken from the stream and the applier not yet.

A reading that breaks is abandoned with its feed, and another begins from the stored position. So nothing of an old
reading can disturb a new one: what is still in flight of it is applied or found a duplicate.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from anyio import Event

from indexer.partition.pull_protocol import parse_delivery
from kvatlas.bus.wire import RawMessage
from kvatlas.index.protocol import PartitionBatch, Position

QUEUE_MESSAGES = 4_096
QUEUE_BYTES = 1024 * 1024


Entry = tuple[RawMessage | None, int, str, Mapping[str, str] | None]
"""A message as it waits: (message, bytes, reply subject, headers). The message is None where it must not be applied: only
its position passes. The headers are there where they carry a trace context. A plain tuple, because one is made a message."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call to the index carries of one feed."""

    feed: "PartitionFeed"
    batch: PartitionBatch
    entries: int
    size_bytes: int
    made_room: bool
    traced: Sequence[tuple[str, Mapping[str, str]]]
    """(worker, headers) of each message that carries a trace context."""


class PartitionFeed:
    """A queue between one reading of a partition and its shard's applier, with what both know of it."""

    def __init__(self, partition: int, start: Position, pending: int) -> None:
        """Reads after `start`. `pending`: messages in the stream that this reading has before it, when it begins."""
        self.partition = partition
        self.pending = pending
        self.queued_bytes = 0
        self.in_flight = 0
        self.applied_seq: int | None = None
        self.applied_ts_us: int | None = None
        self.broken = Event()
        self.broken_why = ""
        self._entries: list[Entry] = []
        self._taken = 0
        self._position = start
        self.on_room: Callable[[], Awaitable[None]] = _nobody_waits
        """Called after a take that ended `full`."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def received(self) -> int:
        """Messages that this reading got from its consumer."""
        return self._taken + len(self._entries)

    @property
    def full(self) -> bool:
        """The reader asks for no more while this holds."""
        return len(self._entries) >= QUEUE_MESSAGES or self.queued_bytes >= QUEUE_BYTES

    @property
    def at_end(self) -> bool:
        """All that the stream had of the partition is applied, as far as the server has told."""
        return not self._entries and not self.in_flight and not self.pending

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.queued_bytes += entry[1]

    def idle_at(self, consumer_seq: int) -> None:
        """The server has nothing behind its message `consumer_seq`."""
        if consumer_seq == self.received:
            if not self._entries:
                self.pending = 0  # what was pending is gone from the stream (purged or aged out)
        else:
            self.fail(f"{consumer_seq} messages sent, {self.received} received")

    def fail(self, why: str) -> None:
        """This reading is over; the reader begins another."""
        if not self.broken.is_set():
            self.broken_why = why
            self.broken.set()

    def take(self, max_messages: int, max_bytes: int) -> Taken | None:
        """The next messages, at least one where there is any, for one call to the index; None where there are none or
        a message is missing (the feed is broken then)."""
        entries = self._entries
        if not entries or self.broken.is_set():
            return None
        was_full = self.full
        if len(entries) <= max_messages and self.queued_bytes <= max_bytes:
            part, size = entries, self.queued_bytes
            self._entries = []
        else:
            count, size = 1, entries[0][1]
            for _, entry_bytes, _, _ in entries[1:max_messages]:
                if size + entry_bytes > max_bytes:
                    break
                size += entry_bytes
                count += 1
            part = entries[:count]
            self._entries = entries[count:]
        self.queued_bytes -= size
        self._taken += len(part)
        self.in_flight += 1
        delivery = parse_delivery(part[-1][2])
        if delivery.consumer_seq != self._taken:
            self.in_flight -= 1
            self.fail(f"message {delivery.consumer_seq} of the consumer came as the {self._taken}th")
            return None
        self.pending = delivery.pending
        messages = [raw for raw, _, _, _ in part if raw is not None]
        before = self._position
        self._position = Position(before.creation_us, delivery.stream_seq)
        traced = [(raw[1], parents) for raw, _, _, parents in part if parents is not None and raw is not None]
        return Taken(
            self,
            PartitionBatch(self.partition, messages, self._position, before.seq),
            len(part),
            size,
            was_full and not self.full,
            traced,
        )

    def applied(self, batch: PartitionBatch) -> None:
        """The index took the batch."""
        self.in_flight -= 1
        if batch.position is not None:
            self.applied_seq = batch.position.seq
        if batch.messages:
            self.applied_ts_us = batch.messages[-1][4]


async def _nobody_waits() -> None:
    """Until a reading asks to be told of room."""
