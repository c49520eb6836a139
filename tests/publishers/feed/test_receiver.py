"""Receives waiting messages, new messages, and none from a ZMQ socket."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import zmq

from kvatlas_publishers.feed.receiver import Receiver

pytestmark = pytest.mark.anyio


@contextmanager
def pair() -> Iterator[tuple["zmq.Socket[bytes]", Receiver]]:
    """A socket to send on, and the receiver of its messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.bind("inproc://pair")
    socket.connect("inproc://pair")
    yield sender, Receiver(socket)
    context.destroy(linger=0)


async def test_messages_that_wait_are_received_in_order_without_a_task_switch() -> None:
    with pair() as (sender, receiver):
        for number in range(3):
            sender.send_multipart([b"topic", bytes([number])])
        received = []
        with anyio.CancelScope() as scope:
            scope.cancel()  # a task switch would raise
            for _ in range(3):
                received.append(await receiver.receive(10.0))
        assert received == [[b"topic", bytes([number])] for number in range(3)]


async def test_a_message_ends_the_wait_for_it() -> None:
    with pair() as (sender, receiver), anyio.fail_after(60):
        for number in range(3):  # after an empty queue, the descriptor reports each message
            async with anyio.create_task_group() as tasks:
                received: list[list[bytes] | None] = []

                async def receive(into: list[list[bytes] | None] = received) -> None:
                    while not into or into[-1] is None:
                        into.append(await receiver.receive(60.0))

                tasks.start_soon(receive)
                await anyio.wait_all_tasks_blocked()
                sender.send(bytes([number]))
            assert received[-1] == [bytes([number])]


async def test_without_a_message_the_wait_ends_by_time() -> None:
    with pair() as (_, receiver):
        assert await receiver.receive(0.0) is None
