from hypothesis import given
from hypothesis import strategies as st

from kvatlas.bus.partition_batch import Position
from kvatlas.bus.queue import QUEUE_BYTES, QUEUE_MESSAGES, PartitionQueue
from kvatlas.bus.wire import SEQ, RawMessage

Entry = tuple[RawMessage | None, int, str]
"""The arguments of `add`."""


def entry(number: int, size_bytes: int = 10, pending: int = 0, stream_seq: int | None = None) -> Entry:
    """Message `number` of the consumer."""
    seq = stream_seq if stream_seq is not None else 100 + number
    return [1, "w", 1, number, 5, {}, []], size_bytes, f"$JS.ACK.S.C.1.{seq}.{number}.0.{pending}"


def queue_of(*entries: Entry, pending: int = 0) -> PartitionQueue:
    queue = PartitionQueue(3, Position(77, 100), pending)
    for one in entries:
        queue.add(*one)
    return queue


def test_a_take_carries_the_position_after_its_last_message_and_the_one_before() -> None:
    queue = queue_of(entry(1), entry(2, stream_seq=140))
    first = queue.take(512, 10_000)
    queue.add(*entry(3, stream_seq=150))
    second = queue.take(512, 10_000)
    assert first is not None and second is not None
    assert (first.batch.after_seq, first.batch.position) == (100, Position(77, 140))
    assert (second.batch.after_seq, second.batch.position) == (140, Position(77, 150))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 200))
def test_takes_keep_order_and_limits_and_lose_nothing(sizes: list[int], messages: int, size: int) -> None:
    queue = queue_of(*(entry(i, size) for i, size in enumerate(sizes, 1)))
    seen = []
    while taken := queue.take(messages, size):
        assert len(taken.batch.messages) <= messages
        assert taken.size_bytes <= size or taken.entries == 1
        seen += [raw[SEQ] for raw in taken.batch.messages]
        queue.record_applied(taken.batch)
    assert seen == list(range(1, len(sizes) + 1))
    assert queue.queued_bytes == 0 and queue.at_end


def test_a_poison_message_only_moves_the_position() -> None:
    queue = queue_of(entry(1), (None, 5, "$JS.ACK.S.C.1.102.2.0.0"))
    taken = queue.take(512, 10_000)
    assert taken is not None
    assert len(taken.batch.messages) == 1
    assert taken.batch.position == Position(77, 102)


def test_a_lost_message_fails_the_queue() -> None:
    queue = queue_of(entry(1), entry(3))
    assert queue.take(512, 10_000) is None
    assert queue.failed.is_set()
    assert queue.take(512, 10_000) is None


def test_a_queue_is_at_its_end_when_all_is_applied_and_none_pending() -> None:
    queue = queue_of(pending=2)
    assert not queue.at_end
    queue.add(*entry(1, pending=1))
    queue.add(*entry(2))
    taken = queue.take(512, 10_000)
    assert taken is not None and not queue.at_end
    queue.record_applied(taken.batch)
    assert queue.at_end


def test_messages_that_aged_out_of_the_stream_are_not_pending() -> None:
    queue = queue_of(pending=9)
    queue.record_idle(0)
    assert queue.at_end


def test_an_idle_consumer_that_sent_more_than_was_received_fails_the_queue() -> None:
    queue = queue_of(entry(1))
    queue.record_idle(2)
    assert queue.failed.is_set()


def test_a_queue_is_full_by_messages_or_by_bytes_and_a_take_says_when_it_made_room() -> None:
    by_messages = queue_of(*(entry(i, 1) for i in range(1, QUEUE_MESSAGES + 1)))
    by_bytes = queue_of(entry(1, QUEUE_BYTES - 1), entry(2, 1))
    for queue in (by_messages, by_bytes):
        assert queue.full
        taken = queue.take(1, 1)
        assert taken is not None and taken.made_room and not queue.full
