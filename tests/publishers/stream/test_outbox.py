"""Go-back-N over a bus that loses, repeats, delays and reorders, read by a receiver with the index's fence."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import decode
from kvatlas.events import IndexEvent, Message, ScopeUse, SnapshotBegin, SnapshotChunk, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas_publishers.stream.outbox import Outbox, OutboxLimits, Outgoing

SCOPE = Scope("model", "tokenizer")
USES = {SCOPE.scope_id: ScopeUse(SCOPE, 16, 0)}
EMPTY = Digest().words


def stored(*numbers: int) -> Stored:
    return Stored(SCOPE.scope_id, Tier.HBM, pack_hashes(numbers))


def chunk(*numbers: int) -> SnapshotChunk:
    return SnapshotChunk(SCOPE.scope_id, Tier.HBM, pack_hashes(numbers))


@dataclass
class Receiver:
    """The index's fence: it accepts a higher incarnation only with the begin of its snapshot, and otherwise only seq = last +
    1."""

    incarnation: int = 0
    seq: int = -1
    events: list[IndexEvent] = field(default_factory=list)

    def take(self, message: Message) -> None:
        if message.incarnation > self.incarnation:
            if message.seq or not isinstance(message.events[0], SnapshotBegin):
                return
            self.incarnation, self.seq, self.events = message.incarnation, -1, []
        if message.incarnation == self.incarnation and message.seq == self.seq + 1:
            self.seq = message.seq
            self.events.extend(message.events)


@dataclass
class Bus:
    """Messages in flight: copies that may still reach the stream, and acknowledgements that may still come back."""

    rng: random.Random
    faulty: bool = True
    receiver: Receiver = field(default_factory=Receiver)
    late: list[Outgoing] = field(default_factory=list)
    acks: list[tuple[int, int, int]] = field(default_factory=list)
    last: int = 0

    def chance(self, probability: float) -> bool:
        return self.faulty and self.rng.random() < probability

    def send(self, outgoing: Outgoing) -> None:
        if self.chance(0.1):
            return
        if self.chance(0.1):
            self.late.append(outgoing)
            return
        self.store(outgoing)

    def store(self, outgoing: Outgoing) -> None:
        for _ in range(2 if self.chance(0.1) else 1):
            self.receiver.take(decode(outgoing.payload))
            self.last += 1
            if not self.chance(0.15):
                self.acks.append((outgoing.round, outgoing.seq, self.last))

    def some_late_copy(self) -> None:
        if self.late:
            self.store(self.late.pop(self.rng.randrange(len(self.late))))

    def some_ack(self, outbox: Outbox) -> None:
        if self.acks:
            outbox.acknowledge(*self.acks.pop(self.rng.randrange(len(self.acks)) if self.chance(0.5) else 0))


LIMITS = OutboxLimits(outbox_messages=12, outbox_bytes=4000, window_messages=4, window_bytes=900, message_bytes=400)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(20, 250))
def test_everything_put_in_arrives_in_order(seed: int, moves: int) -> None:
    rng = random.Random(seed)
    outbox, bus = Outbox("w", LIMITS), Bus(rng)
    counter = 0
    expected: list[IndexEvent] = []

    def begin() -> None:
        nonlocal expected, counter
        chunks = [chunk(*range(counter + i, counter + i + rng.randint(1, 20))) for i in range(rng.randrange(4))]
        counter += 100
        outbox.begin(outbox.incarnation + rng.randint(1, 5), chunks, EMPTY, USES, 0)
        expected = [SnapshotBegin(), *chunks, SnapshotEnd(len(chunks), EMPTY)]

    def check() -> None:
        if bus.receiver.incarnation == outbox.incarnation:
            assert bus.receiver.events == expected[: len(bus.receiver.events)]
            assert bus.receiver.seq >= outbox.acked_seq

    begin()
    for _ in range(moves):
        match rng.randrange(8):
            case 0 | 1:
                flush: list[IndexEvent] = [stored(counter + i) for i in range(rng.randint(1, 4))]
                counter += 4
                if outbox.put(flush, USES, 0):
                    expected = expected + flush
            case 2 | 3:
                if (outgoing := outbox.take()) is not None:
                    bus.send(outgoing)
            case 4 | 5:
                bus.some_ack(outbox)
            case 6:
                bus.some_late_copy()
            case 7 if rng.random() < 0.3:
                outbox.go_back()
            case 7 if outbox.overflowed or rng.random() < 0.05:
                begin()
        check()

    bus.faulty = False
    while not outbox.empty:
        outbox.go_back()
        while (outgoing := outbox.take()) is not None:
            bus.send(outgoing)
        while bus.acks:
            bus.some_ack(outbox)
        while bus.late:
            bus.some_late_copy()
        check()
    assert bus.receiver.incarnation == outbox.incarnation
    assert bus.receiver.events == expected
    assert outbox.empty


def test_an_ack_of_an_earlier_round_releases_nothing() -> None:
    outbox = Outbox("w")
    outbox.begin(7, [], EMPTY, {}, 0)
    first = outbox.take()
    assert first is not None
    assert outbox.go_back() == 1
    assert outbox.acknowledge(first.round, first.seq, 1) == 0
    again = outbox.take()
    assert again is not None
    assert again.payload == first.payload
    assert outbox.acknowledge(again.round, again.seq, 2) == 1
    assert outbox.acked_seq == 0


def test_a_copy_stored_before_its_predecessor_is_not_released() -> None:
    outbox = Outbox("w")
    outbox.begin(7, [], EMPTY, {}, 0)
    outbox.put([stored(1)], USES, 0)
    while outbox.take():
        pass
    assert outbox.acknowledge(outbox.round, 1, 1) == 0
    assert outbox.acknowledge(outbox.round, 0, 2) == 1
    assert outbox.waiting == 1, "the index read seq 1 before seq 0, so it dropped it as a gap"
    assert outbox.go_back() == 1


def test_acks_count_again_after_the_stream_was_created_again() -> None:
    outbox = Outbox("w")
    outbox.begin(7, [], EMPTY, {}, 0)
    outbox.take()
    outbox.acknowledge(outbox.round, 0, 1000)
    outbox.put([stored(1)], USES, 0)
    outbox.take()
    assert outbox.acknowledge(outbox.round, 1, 1) == 0
    assert outbox.misplaced
    outbox.go_back()
    assert not outbox.misplaced
    outbox.take()
    assert outbox.acknowledge(outbox.round, 1, 2) == 1


def test_a_small_snapshot_is_one_message() -> None:
    outbox = Outbox("w")
    chunks = [chunk(*range(i, i + 100)) for i in range(0, 1000, 100)]
    assert outbox.begin(1, chunks, EMPTY, USES, 5) == 1
    outgoing = outbox.take()
    assert outgoing is not None
    assert decode(outgoing.payload) == Message("w", 1, 0, [SnapshotBegin(), *chunks, SnapshotEnd(10, EMPTY)], USES, 5)


def test_a_large_snapshot_is_contiguous_and_not_bounded_by_the_outbox() -> None:
    outbox = Outbox("w", OutboxLimits(outbox_messages=2, outbox_bytes=2000, message_bytes=1000))
    chunks = [chunk(*range(i, i + 50)) for i in range(0, 1000, 50)]
    assert outbox.begin(1, chunks, EMPTY, USES, 5) > 10
    assert outbox.put([stored(1)], USES, 5) == 1
    received: list[IndexEvent] = []
    while (outgoing := outbox.take()) is not None:
        assert len(outgoing.payload) <= 1000
        received.extend(decode(outgoing.payload).events)
    assert received == [SnapshotBegin(), *chunks, SnapshotEnd(len(chunks), EMPTY), stored(1)]


@pytest.mark.parametrize(
    "limits", [OutboxLimits(outbox_messages=5), OutboxLimits(outbox_bytes=500)], ids=["messages", "bytes"]
)
def test_after_an_overflow_nothing_is_taken_until_a_new_incarnation(limits: OutboxLimits) -> None:
    outbox = Outbox("w", limits)
    outbox.begin(1, [], EMPTY, {}, 0)
    count = 0
    while outbox.put([stored(count)], USES, 0):
        count += 1
    assert outbox.overflowed
    kept = outbox.next_seq
    while outbox.take():
        pass
    for seq in range(kept):
        outbox.acknowledge(outbox.round, seq, seq + 1)
    assert outbox.empty
    assert outbox.put([stored(99)], USES, 0) == 0, "after a hole only a snapshot may follow"
    outbox.begin(2, [], EMPTY, {}, 0)
    assert outbox.put([stored(100)], USES, 0) == 1


def test_the_window_bounds_what_is_in_flight() -> None:
    outbox = Outbox("w", OutboxLimits(window_messages=3))
    outbox.begin(1, [], EMPTY, {}, 0)
    for i in range(5):
        outbox.put([stored(i)], USES, 0)
    taken = [outbox.take() for _ in range(5)]
    assert [t.seq for t in taken if t is not None] == [0, 1, 2]
    outbox.acknowledge(outbox.round, 1, 2)
    assert outbox.take() is None, "an acknowledgement out of order opens no window"
    outbox.acknowledge(outbox.round, 0, 1)
    assert [t.seq for t in (outbox.take(), outbox.take()) if t is not None] == [3, 4]


def test_nothing_is_published_before_the_first_incarnation() -> None:
    outbox = Outbox("w")
    assert outbox.put([stored(1)], USES, 0) == 0
    assert outbox.take() is None
    assert outbox.acked_seq == -1


def test_an_incarnation_never_goes_back() -> None:
    outbox = Outbox("w")
    outbox.begin(5, [], EMPTY, {}, 0)
    with pytest.raises(ValueError, match="incarnation 5 after 5"):
        outbox.begin(5, [], EMPTY, {}, 0)
