"""A TCP proxy that breaks connections in the ways that networks do."""

import asyncio
from collections.abc import Awaitable
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
MOST_ON_THE_WAY = 256


class TcpProxy:
    """Listens on a free loopback port and forwards to `target_port`.

    `cut`: every connection is reset, including new ones. `stall`: connections stay open, and new ones are accepted, but no
    byte gets through either way (half-open). `delay_s`: every piece arrives this much later, as over a long line. `heal` ends
    all of this.
    """

    def __init__(self, target_port: int, name: str) -> None:
        """`name`: the connection's, for reports."""
        self.name = name
        self.target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = False
        self.delay_s = 0.0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flowing.set()
        await self._server.wait_closed()

    def cut(self) -> None:
        self._cut = True
        self.reset()

    def reset(self) -> None:
        """Reset every connection; new ones work."""
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._cut = False
        self.delay_s = 0.0
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._writers |= ends
        try:
            if self._cut:
                return
            await self._flowing.wait()
            target_reader, target_writer = await asyncio.open_connection(LOOPBACK, self.target_port)
            ends.add(target_writer)
            self._writers.add(target_writer)
            pumps: list[Awaitable[None]] = [self._pump(reader, target_writer), self._pump(target_reader, writer)]
            await asyncio.gather(*pumps)
        except OSError:
            return  # the target is down
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_ON_THE_WAY)
        delivery = asyncio.create_task(self._deliver(on_the_way, writer))
        try:
            piece = b"?"
            while piece:
                piece = await reader.read(CHUNK_BYTES)
                await on_the_way.put((asyncio.get_running_loop().time() + self.delay_s, piece))
            await delivery
        except OSError:
            pass  # either end broke it; the other end is closed below
        finally:
            delivery.cancel()
            writer.transport.abort()

    async def _deliver(self, on_the_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        """Write what is due, until the empty piece at the end."""
        while True:
            due_s, piece = await on_the_way.get()
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))  # the fault itself: a long line
            await self._flowing.wait()
            if not piece:
                return
            try:
                writer.write(piece)
                await writer.drain()
            except OSError:
                writer.transport.abort()
                return
