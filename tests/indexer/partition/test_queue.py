from hypothesis import given
from hypothesis import strategies as st

from indexer.partition.queue import QUEUE_BYTES, QUEUE_MESSAGES, Entry, PartitionFeed
from kvatlas.index.protocol import Position


def entry(number: int, size_bytes: int = 10, pending: int = 0, stream_seq: int | None = None) -> Entry:
    """The `number`th message of the consumer."""
    seq = stream_seq if stream_seq is not None else 100 + number
    return [1, "w", 1, number, 5, {}, []], size_bytes, f"$JS.ACK.S.C.1.{seq}.{number}.0.{pending}", None


def feed_of(*entries: Entry, pending: int = 0) -> PartitionFeed:
    feed = PartitionFeed(3, Position(77, 100), pending)
    for one in entries:
        feed.add(one)
    return feed


def test_a_take_carries_the_position_after_its_last_message_and_the_one_before() -> None:
    feed = feed_of(entry(1), entry(2, stream_seq=140))
    first = feed.take(512, 10_000)
    feed.add(entry(3, stream_seq=150))
    second = feed.take(512, 10_000)
    assert first is not None and second is not None
    assert (first.batch.after_seq, first.batch.position) == (100, Position(77, 140))
    assert (second.batch.after_seq, second.batch.position) == (140, Position(77, 150))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 200))
def test_takes_keep_order_and_limits_and_lose_nothing(sizes: list[int], messages: int, size: int) -> None:
    feed = feed_of(*(entry(i, size) for i, size in enumerate(sizes, 1)))
    seen = []
    while taken := feed.take(messages, size):
        assert len(taken.batch.messages) <= messages
        assert taken.size_bytes <= size or taken.entries == 1
        seen += [raw[3] for raw in taken.batch.messages]
        feed.applied(taken.batch)
    assert seen == list(range(1, len(sizes) + 1))
    assert feed.queued_bytes == 0 and feed.at_end


def test_a_message_that_must_not_be_applied_passes_its_position_only() -> None:
    feed = feed_of(entry(1), (None, 5, entry(2)[2], None))
    taken = feed.take(512, 10_000)
    assert taken is not None
    assert len(taken.batch.messages) == 1
    assert taken.batch.position == Position(77, 102)


def test_a_message_lost_on_the_way_breaks_the_reading() -> None:
    feed = feed_of(entry(1), entry(3))
    assert feed.take(512, 10_000) is None
    assert feed.broken.is_set()
    assert feed.take(512, 10_000) is None


def test_it_is_at_its_end_when_all_is_applied_and_nothing_pending() -> None:
    feed = feed_of(pending=2)
    assert not feed.at_end
    feed.add(entry(1, pending=1))
    feed.add(entry(2))
    taken = feed.take(512, 10_000)
    assert taken is not None and not feed.at_end
    feed.applied(taken.batch)
    assert feed.at_end


def test_what_aged_out_of_the_stream_is_not_waited_for() -> None:
    feed = feed_of(pending=9)
    feed.idle_at(0)
    assert feed.at_end


def test_an_idle_consumer_that_sent_more_than_came_breaks_the_reading() -> None:
    feed = feed_of(entry(1))
    feed.idle_at(2)
    assert feed.broken.is_set()


def test_it_is_full_by_messages_or_by_bytes_and_tells_when_it_is_not_any_more() -> None:
    by_messages = feed_of(*(entry(i, 1) for i in range(1, QUEUE_MESSAGES + 1)))
    by_bytes = feed_of(entry(1, QUEUE_BYTES - 1), entry(2, 1))
    for feed in (by_messages, by_bytes):
        assert feed.full
        taken = feed.take(1, 1)
        assert taken is not None and taken.made_room and not feed.full
