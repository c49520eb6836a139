"""Messages that a pull consumer has read from the stream, but that its reader has not applied yet.

A queue is never repaired: when in doubt, it fails, and the reader starts a new one from the stored position. Messages that the
old queue still has in flight are either applied or found to be duplicates.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from anyio import Event

from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.pull_protocol import parse_delivery
from kvatlas.bus.wire import TS_US, WORKER_ID, RawMessage

QUEUE_MESSAGES = 4_096
QUEUE_BYTES = 1024 * 1024
EVERY_PARTITION = -1
"""The partition number of a queue that holds the messages of all partitions."""

Headers = Mapping[str, str]

_Entry = tuple[RawMessage | None, int, str, Headers | None]
"""(message, bytes, reply subject, headers): a plain tuple, because every message needs one."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """The part of one call to the index that comes from one queue."""

    queue: "PartitionQueue"
    batch: PartitionBatch
    entries: int
    size_bytes: int
    made_room: bool
    traced: Sequence[tuple[str, Headers]]
    """(worker, headers) of each message that carries a trace context."""


class PartitionQueue:
    """A queue between a pull consumer and the applier; it checks that no message is missing."""

    def __init__(
        self, partition: int, start: Position, pending: int, on_room: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`start`: the position before the first message. `pending`: the number of messages in the stream after it. `on_room`:
        to be called after a take that ended the `full` state."""
        self.partition = partition
        self.pending = pending
        self.on_room = on_room
        self.queued_bytes = 0
        self.in_flight = 0
        self.applied_seq: int | None = None
        self.applied_ts_us: int | None = None
        self.failed = Event()
        self.failure = ""
        """Why the queue failed."""
        self._entries: list[_Entry] = []
        self._taken = 0
        self._position = start

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def received(self) -> int:
        """The number of messages that the consumer has delivered."""
        return self._taken + len(self._entries)

    @property
    def full(self) -> bool:
        """True as long as the consumer must not request more."""
        return len(self._entries) >= QUEUE_MESSAGES or self.queued_bytes >= QUEUE_BYTES

    @property
    def at_end(self) -> bool:
        """True if everything that the stream holds for this partition has been applied, as far as the server has reported."""
        return not self._entries and not self.in_flight and not self.pending

    def add(self, message: RawMessage | None, size_bytes: int, reply: str, headers: Headers | None = None) -> None:
        """Append a delivered message. `message=None`: it must not be applied, and only its position counts. `headers`: given
        only if they carry a trace context."""
        self._entries.append((message, size_bytes, reply, headers))
        self.queued_bytes += size_bytes

    def record_idle(self, consumer_seq: int) -> None:
        """Record that the server has nothing to deliver after the message with this `consumer_seq`."""
        if consumer_seq == self.received:
            if not self._entries:
                self.pending = 0  # the pending messages are gone from the stream (purged or aged out)
        else:
            self.fail(f"NATS sent {consumer_seq} messages, {self.received} were received")

    def fail(self, why: str) -> None:
        """Make the queue fail: nothing more is taken from it, and the reader starts another one."""
        if not self.failed.is_set():
            self.failure = why
            self.failed.set()

    def take(self, max_messages: int, max_bytes: int) -> CallPart | None:
        """Take the next messages (at least one) for one call to the index. Returns None if the queue is empty, or if a message
        is missing (in that case, the queue fails)."""
        if not self._entries or self.failed.is_set():
            return None
        was_full = self.full
        part, size = self._cut(max_messages, max_bytes)
        self.queued_bytes -= size
        self._taken += len(part)
        _, _, reply, _ = part[-1]
        delivery = parse_delivery(reply)
        if delivery.consumer_seq != self._taken:
            self.fail(f"message {delivery.consumer_seq} of the consumer arrived as number {self._taken}")
            return None
        self.in_flight += 1
        self.pending = delivery.pending
        messages = [message for message, _, _, _ in part if message is not None]
        before = self._position
        self._position = Position(before.creation_us, delivery.stream_seq)
        return CallPart(
            self,
            PartitionBatch(self.partition, messages, self._position, before.seq),
            len(part),
            size,
            was_full and not self.full,
            [(message[WORKER_ID], headers) for message, _, _, headers in part if headers and message is not None],
        )

    def _cut(self, max_messages: int, max_bytes: int) -> tuple[list[_Entry], int]:
        """Remove the first entries that fit within the limits, but at least one. Returns them and their size in bytes."""
        entries = self._entries
        if len(entries) <= max_messages and self.queued_bytes <= max_bytes:
            self._entries = []
            return entries, self.queued_bytes
        count = 1
        _, size, _, _ = entries[0]
        for _, size_bytes, _, _ in entries[1:max_messages]:
            if size + size_bytes > max_bytes:
                break
            size += size_bytes
            count += 1
        self._entries = entries[count:]
        return entries[:count], size

    def record_applied(self, batch: PartitionBatch) -> None:
        self.in_flight -= 1
        if batch.position is not None:
            self.applied_seq = batch.position.seq
        if batch.messages:
            self.applied_ts_us = batch.messages[-1][TS_US]

    def fail_in_flight(self, why: str) -> None:
        """Record that the index did not apply a batch from this queue and never will."""
        self.in_flight -= 1
        self.fail(why)
