"""The effects of the event socket's connection on the feed. Times are made up."""

import pytest

from kvatlas_publishers.feed.connection_state import GRACE_S, LONGEST_SILENCE_S, Connection, ConnectionState, Task

SILENCE_S = 2.0


def next_task(
    state: ConnectionState, now_s: float, *, message: bool = False, engine_up: bool = False, takes_s: float = 0.0
) -> Task:
    """The next task, which is finished after `takes_s`."""
    task = state.next_task(now_s, message=message, engine_up=engine_up)
    state.finish(task, now_s + takes_s)
    return task


def connected() -> ConnectionState:
    """Connected at 0, and probed for earlier batches."""
    state = ConnectionState(SILENCE_S, 0.0)
    state.record_connect()
    assert next_task(state, 0.0) is Task.PROBE
    state.finish(Task.TAKE, 0.0)
    return state


def test_a_first_connection_is_awaited_and_after_the_grace_it_is_away() -> None:
    state = ConnectionState(SILENCE_S, 10.0)
    assert [state.connection(10.0 + after_s) for after_s in (0.0, GRACE_S - 0.1, GRACE_S)] == [
        Connection.CONNECTING,
        Connection.CONNECTING,
        Connection.AWAY,
    ]
    state.record_connect()
    assert state.connection(100.0) is Connection.CONNECTED


def test_a_lost_connection_counts_as_alive_for_the_grace() -> None:
    state = connected()
    state.record_disconnect(50.0)
    assert [state.connection(50.0 + after_s) for after_s in (0.0, GRACE_S - 0.1, GRACE_S)] == [
        Connection.LOST,
        Connection.LOST,
        Connection.AWAY,
    ]
    assert [one for one in Connection if one.alive] == [Connection.CONNECTED, Connection.LOST]


def test_a_bound_socket_is_connected_until_its_last_connection_is_lost() -> None:
    state = connected()
    state.record_connect()
    state.record_disconnect(50.0)
    assert state.connection(100.0) is Connection.CONNECTED
    assert next_task(state, 50.0) is Task.PROBE, "of the second connection; nothing was lost"
    state.record_disconnect(100.0)
    assert state.connection(100.0) is Connection.LOST


def test_a_message_is_taken() -> None:
    state = connected()
    assert next_task(state, 1.0, message=True) is Task.TAKE
    assert next_task(state, 1.0) is Task.WAIT


def test_silence_is_probed_with_growing_pauses_until_a_message_comes() -> None:
    state = connected()
    probed_s = [tenth / 10 for tenth in range(600) if next_task(state, tenth / 10) is Task.PROBE]
    assert probed_s == [2.0, 6.0, 14.0, 29.0, 44.0, 59.0]
    assert probed_s[-1] - probed_s[-2] == LONGEST_SILENCE_S
    assert next_task(state, 60.0, message=True) is Task.TAKE
    assert next_task(state, 60.0 + SILENCE_S) is Task.PROBE


def test_silence_is_counted_from_the_end_of_the_last_task() -> None:
    state = connected()
    assert next_task(state, 1.0, message=True, takes_s=5.0) is Task.TAKE
    assert next_task(state, 7.9) is Task.WAIT
    assert next_task(state, 8.0) is Task.PROBE


@pytest.mark.parametrize(("engine_up", "task"), [(False, Task.WAIT), (True, Task.PROBE)])
def test_without_a_connection_silence_is_probed_only_if_the_engine_is_known_to_be_up(
    engine_up: bool, task: Task
) -> None:
    state = connected()
    state.record_disconnect(0.0)
    assert next_task(state, 100.0, engine_up=engine_up) is task


def test_a_connection_that_was_lost_and_is_back_comes_before_messages() -> None:
    state = connected()
    state.record_disconnect(1.0)
    assert next_task(state, 1.0, message=True) is Task.TAKE, "still queued in the socket"
    state.record_connect()
    assert next_task(state, 1.5, message=True) is Task.RECONNECT
    assert next_task(state, 1.5) is Task.WAIT, "the reconnect is the probe, too"


def test_a_restart_comes_before_everything_else_and_keeps_the_reconnect_due() -> None:
    state = connected()
    state.record_disconnect(1.0)
    state.record_connect()
    state.record_restart()
    assert next_task(state, 1.5, message=True) is Task.RESTART
    assert next_task(state, 1.5, message=True) is Task.RECONNECT
    assert next_task(state, 1.5, message=True) is Task.TAKE


def test_a_restart_does_not_end_the_silence() -> None:
    state = connected()
    state.record_restart()
    assert next_task(state, 1.0, takes_s=0.9) is Task.RESTART
    assert next_task(state, SILENCE_S) is Task.PROBE
