"""The outbox of one worker's incarnation, which uses go-back-N (pure).

Invariants (property-tested over a bus that loses, repeats, delays and reorders):
- a message is released only after all earlier ones. So the stream's messages of an incarnation, read through the fence
  `seq = last + 1`, are always a prefix of what was put in, and all of it once the outbox is empty;
- an acknowledgement counts only if it belongs to the current round and its stream position is above that of the previous
  message. The index treats any other copy as a gap and drops it;
- an incarnation starts with its snapshot, whose messages are contiguous.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvatlas.bus import wire
from kvatlas.events import (
    Checkpoint,
    Heads,
    IndexEvent,
    Marked,
    Message,
    ScopeUse,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
)
from kvatlas_publishers.stream.message_split import SMALLEST_MESSAGE_BYTES, split_chunks, split_into_messages

Headers = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Limits of an outbox. `outbox_*` exclude snapshots, whose size depends on the engine's blocks.

    `window_*`: limits of sent but unacknowledged messages; one message may always be sent.
    """

    outbox_messages: int = 65_536
    outbox_bytes: int = 64 << 20
    window_messages: int = 1024
    window_bytes: int = 8 << 20
    message_bytes: int = wire.MAX_MESSAGE_BYTES


class Outgoing(NamedTuple):
    """One message to send now. Its acknowledgement must name `round` and `seq`."""

    round: int
    seq: int
    payload: bytes
    headers: Headers


class _Kept(NamedTuple):
    payload: bytes
    headers: Headers
    counted_bytes: int


class Outbox:
    """See the module docstring. Before the first `begin` there is no incarnation (0)."""

    def __init__(self, worker_id: str, limits: OutboxLimits | None = None, granularity: int = 1) -> None:
        self.worker_id = worker_id
        self.limits = limits or OutboxLimits()
        self.incarnation = 0
        self.overflowed = False
        """True if something did not fit: no more is taken until the next `begin`."""
        self.round = 0
        self.misplaced = False
        """True if the first kept message was stored, but not after the previous message: only going back helps."""
        self._granularity = granularity
        self._kept: deque[_Kept] = deque()
        self._base = 0
        """seq of the first message kept"""
        self._sent = 0
        """how many of the kept messages were sent in this round"""
        self._sent_bytes = 0
        self._position = 0
        """stream position of the last message released in this round"""
        self._early: dict[int, int] = {}
        """stream positions of messages acknowledged in this round before an earlier message was"""
        self._counted_messages = 0
        self._counted_bytes = 0

    # ---------------------------------------------------------------- state

    @property
    def next_seq(self) -> int:
        return self._base + len(self._kept)

    @property
    def acked_seq(self) -> int:
        """The last seq of this incarnation up to which the stream has every message; -1 before the first."""
        return self._base - 1

    @property
    def in_flight(self) -> int:
        """Number of messages that have been sent in this round but not released."""
        return self._sent

    @property
    def unsent(self) -> bool:
        """True if a message has not been sent yet in this round."""
        return len(self._kept) > self._sent

    @property
    def waiting(self) -> int:
        """Number of messages that have not been released, whether sent or not."""
        return len(self._kept)

    @property
    def empty(self) -> bool:
        return not self._kept

    # ---------------------------------------------------------------- putting in

    def limit_message_bytes(self, largest_bytes: int) -> None:
        """Limit new messages to the largest size that the server accepts. Messages already in the outbox stay as they
        are."""
        if largest_bytes < self.limits.message_bytes:
            self.limits = replace(self.limits, message_bytes=largest_bytes)

    def begin(
        self,
        incarnation: int,
        chunks: Sequence[SnapshotChunk],
        digest: Sequence[int],
        uses: Mapping[bytes, ScopeUse],
        ts_us: int,
        headers: Headers = None,
        *,
        dropped: int | None = None,
        marks: Sequence[Marked | Heads] = (),
    ) -> int:
        """Start an incarnation with a snapshot, and drop what is left of the previous one. Returns the number of messages.

        `digest`: as in `SnapshotEnd`, over all chunks and marks. `incarnation`: above the previous one. `dropped`: see
        `SnapshotBegin`; `marks` are allowed only with it.
        """
        if incarnation <= self.incarnation:
            raise ValueError(f"incarnation {incarnation} after {self.incarnation}; expected a higher one")
        self._kept.clear()
        self._early.clear()
        self.incarnation = incarnation
        self.overflowed = self.misplaced = False
        self.round += 1
        self._base = self._sent = self._sent_bytes = self._position = 0
        self._counted_messages = self._counted_bytes = 0
        largest = min(self.limits.message_bytes, wire.MAX_SNAPSHOT_MESSAGE_BYTES)
        pieces = split_chunks(chunks, uses, largest, self._granularity)
        events: list[IndexEvent] = [SnapshotBegin(dropped), *pieces, *marks, SnapshotEnd(len(pieces), digest)]
        payloads = self._encode(events, uses, ts_us, largest)
        self._kept.extend(_Kept(payload, headers, 0) for payload in payloads)
        return len(payloads)

    def put(
        self, events: Sequence[IndexEvent], uses: Mapping[bytes, ScopeUse], ts_us: int, headers: Headers = None
    ) -> int:
        """Take the events of one flush. Returns the number of messages; 0 if they don't fit, in which case none is taken and
        `overflowed` is set.

        `uses` describes every scope of the events; each message carries those that it uses.
        """
        if not events:
            return 0
        if self.overflowed or not self.incarnation:
            self.overflowed = True
            return 0
        payloads = self._encode(events, uses, ts_us, self.limits.message_bytes)
        total = sum(map(len, payloads))
        if (
            self._counted_messages + len(payloads) > self.limits.outbox_messages
            or self._counted_bytes + total > self.limits.outbox_bytes
        ):
            self.overflowed = True
            return 0
        self._counted_messages += len(payloads)
        self._counted_bytes += total
        self._kept.extend(_Kept(payload, headers, len(payload)) for payload in payloads)
        return len(payloads)

    def halve_messages(self, seq: int) -> bool:
        """Handle a message that is too large for the stream: drop all kept messages, and limit new ones to half its size from
        the next `begin` on. If messages can't be that small, change nothing and return False."""
        largest_bytes = len(self._kept[seq - self._base].payload) // 2
        if largest_bytes < SMALLEST_MESSAGE_BYTES:
            return False
        self.limit_message_bytes(largest_bytes)
        self.drop()
        return True

    def drop(self) -> None:
        """Send and take no more messages until the next `begin`."""
        self._base += len(self._kept)
        self._kept.clear()
        self._early.clear()
        self._sent = self._sent_bytes = 0
        self._counted_messages = self._counted_bytes = 0
        self.round += 1
        self.misplaced = False
        self.overflowed = True

    def finish(self, event: IndexEvent, ts_us: int) -> None:
        """Put in the last message of this incarnation, regardless of the limits. No more are taken until the next
        `begin`."""
        (payload,) = self._encode([event], {}, ts_us, self.limits.message_bytes)
        self._kept.append(_Kept(payload, None, 0))
        self.overflowed = True

    def checkpoint(self, digest: Sequence[int], ts_us: int) -> int:
        """Put in a checkpoint. `digest` (see `Checkpoint`) covers everything put in so far."""
        return self.put([Checkpoint(digest)], {}, ts_us)

    def _encode(
        self, events: Sequence[IndexEvent], uses: Mapping[bytes, ScopeUse], ts_us: int, largest_bytes: int
    ) -> list[bytes]:
        seq = self.next_seq
        return [
            wire.encode(Message(self.worker_id, self.incarnation, seq + i, part, scopes, ts_us))
            for i, (part, scopes) in enumerate(split_into_messages(events, uses, largest_bytes, self._granularity))
        ]

    # ---------------------------------------------------------------- sending

    def take(self) -> Outgoing | None:
        """The next message to send; None while the window is full or nothing is left. It counts as sent."""
        at = self._sent
        if at >= len(self._kept) or at >= self.limits.window_messages:
            return None
        kept = self._kept[at]
        if at and self._sent_bytes + len(kept.payload) > self.limits.window_bytes:
            return None
        self._sent += 1
        self._sent_bytes += len(kept.payload)
        return Outgoing(self.round, self._base + at, kept.payload, kept.headers)

    def acknowledge(self, round_: int, seq: int, position: int) -> int:
        """Record that the stream has the copy of `seq` sent in `round_`, at `position`. Returns the number of messages
        released."""
        offset = seq - self._base
        if round_ != self.round or not 0 <= offset < self._sent:
            return 0
        if offset:
            self._early[seq] = max(position, self._early.get(seq, 0))
            return 0
        released = 0
        while position > self._position:
            self._position = position
            self._release()
            released += 1
            if not self._early:
                return released
            position = self._early.pop(self._base, 0)
        self.misplaced = position > 0
        return released

    def go_back(self) -> int:
        """Send everything unreleased again, because a send failed or its acknowledgement is overdue. Returns the number
        already sent."""
        again = self._sent
        self.round += 1
        self.misplaced = False
        self._sent = self._sent_bytes = self._position = 0
        self._early.clear()
        return again

    def _release(self) -> None:
        kept = self._kept.popleft()
        self._base += 1
        self._sent -= 1
        self._sent_bytes -= len(kept.payload)
        if kept.counted_bytes:
            self._counted_messages -= 1
            self._counted_bytes -= kept.counted_bytes
