"""Receives a ZMQ socket's messages (thin). Waiting messages are received without a task switch and without checking the
socket's state. `zmq.asyncio` checks it around each message, which costs a few system calls.
"""

import asyncio

import zmq


class Receiver:
    """Receives from one socket, in one task."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))

    def receive_queued(self) -> list[bytes] | None:
        """The frames of a waiting message; None if none is waiting."""
        receive, frames = self._socket.recv, []
        try:
            while True:
                frame = receive(zmq.NOBLOCK, copy=False)  # the frame has a `more` flag, cheaper than asking the socket
                frames.append(frame.bytes)
                if not frame.more:
                    return frames
        except zmq.Again:
            return None

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The frames of the next message; None if none arrives within about `timeout_s`."""
        frames = self.receive_queued()
        if frames is None:  # from here on, only the next message makes the descriptor readable
            await self._wait(timeout_s)
            frames = self.receive_queued()
        return frames

    async def _wait(self, timeout_s: float) -> None:
        """Wait for any event on the socket. It need not be a message."""
        loop = asyncio.get_running_loop()
        happened = asyncio.Event()
        loop.add_reader(self._descriptor, happened.set)  # it stays readable until the next receive
        timer = loop.call_later(timeout_s, happened.set)
        try:
            await happened.wait()
        finally:
            timer.cancel()
            loop.remove_reader(self._descriptor)
