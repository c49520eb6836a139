"""What an event socket is suspected of, and what not. Times are made up."""

import pytest

from kvatlas_publishers.feed.connection_state import Connection
from kvatlas_publishers.feed.socket_watch import FOREIGN_S, SocketWatch


@pytest.fixture
def watch() -> SocketWatch:
    """A watch that is connected, and has asked replay for earlier batches."""
    watch = SocketWatch("tcp://events:1", "tcp://replay:2", "kv")
    watch.record_connect()
    watch.record_replay(complete=True, answered=True, late_batches=100)
    return watch


def seen(
    watch: SocketWatch, connection: Connection = Connection.CONNECTED, *, up: bool = False, at: float = 0.0
) -> str:
    suspicion = watch.suspicion(connection, engine_up=up, now_s=at)
    return suspicion.seen if suspicion is not None else ""


def test_what_was_sent_before_the_connection_is_not_late(watch: SocketWatch) -> None:
    assert not seen(watch)
    watch.record_replay(complete=True, answered=True, late_batches=1)
    assert not seen(watch)
    watch.record_replay(complete=True, answered=True, late_batches=1)
    assert "delivers no events" in seen(watch)
    assert watch.record_message() and not seen(watch)


def test_a_socket_that_brings_events_may_lose_some(watch: SocketWatch) -> None:
    assert watch.record_message() and not watch.record_message()
    watch.record_replay(complete=True, answered=True, late_batches=5)
    assert not seen(watch)


def test_another_topic_is_suspicious_after_a_while_and_not_beside_ours(watch: SocketWatch) -> None:
    watch.record_foreign_topic(b"other", 10.0)
    watch.record_foreign_topic(b"other", 10.5)
    assert not seen(watch, at=10.0 + FOREIGN_S / 2)
    assert "'other'" in seen(watch, at=10.0 + FOREIGN_S)
    watch.record_message()
    assert not seen(watch, at=20.0)


def test_a_missing_connection_is_suspicious_only_while_something_answers(watch: SocketWatch) -> None:
    assert seen(watch, Connection.AWAY).startswith("replay socket tcp://replay:2 answers")
    watch.record_disconnect()
    assert not seen(watch, Connection.AWAY)
    assert seen(watch, Connection.AWAY, up=True).endswith("nothing is connected there")
    watch.record_listener()
    assert seen(watch, Connection.AWAY, up=True).endswith("is not an event socket")
    watch.record_connect()
    assert not seen(watch, up=True)


def test_the_cure_names_the_node_of_a_further_rank() -> None:
    for rank, there in ((None, False), (0, False), (3, True)):
        suspicion = SocketWatch("tcp://node:5560", None, "", rank).suspicion(Connection.AWAY, engine_up=True, now_s=0.0)
        assert suspicion is not None
        assert suspicion.cure.startswith("if rank 3 runs on another node, its event socket is there") is there
