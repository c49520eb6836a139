"""Sends the head of an answer together with the beginning of its body: each write is a system call, and wakes the client."""

import asyncio


class AnswerTransport:
    """A client's transport, for one answer. The first write waits for the second, at most until the event loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._send_head)
        else:
            self._send_head(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send_head(self, body: bytes = b"") -> None:
        if (head := self._head) is None:
            return
        self._head = None
        self.write = self._transport.write  # type: ignore[method-assign]
        if not self._transport.is_closing():
            self._transport.writelines((head, body))
