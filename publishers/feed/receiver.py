"""Receives a ZMQ socket's messages (thin). What waits already is received without a task switch, and without a look at the
socket's state: `zmq.asyncio` asks for that state, which is a few system calls, around each message.
"""

import asyncio

import zmq


class Receiver:
    """Of one socket, for one task."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))

    def receive_queued(self) -> list[bytes] | None:
        """The frames of a message that waits; None if none does."""
        receive, frames = self._socket.recv, []
        try:
            while True:
                frame = receive(zmq.NOBLOCK, copy=False)  # it knows whether more follow: to ask the socket costs more
                frames.append(frame.bytes)
                if not frame.more:
                    return frames
        except zmq.Again:
            return None

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The frames of the next message; None if none came within about `timeout_s`."""
        frames = self.receive_queued()
        if frames is None:  # from here on the descriptor becomes readable with the next message, not before
            await self._wait(timeout_s)
            frames = self.receive_queued()
        return frames

    async def _wait(self, timeout_s: float) -> None:
        """Wait until something happens on the socket, which may also be no message."""
        loop = asyncio.get_running_loop()
        happened = asyncio.Event()
        loop.add_reader(self._descriptor, happened.set)  # it stays readable until the next receive
        timer = loop.call_later(timeout_s, happened.set)
        try:
            await happened.wait()
        finally:
            timer.cancel()
            loop.remove_reader(self._descriptor)
