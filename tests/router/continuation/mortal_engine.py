"""Engines that die mid-answer, as their router sees it: a relay of bytes in front of each closes, resets or stops."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvatlas.store.connection import Store
from tests.router.proxy.engines import Fleet, running_fleet


class Death(StrEnum):
    """`KILLED`: the kernel closes its connections. `RESET`: it resets them. `ENDED`: one more event comes, without its blank
    line, then the end of the body. `STALLED`: no computed byte arrives; its HTTP server still tokenizes."""

    ENDED = "ended"
    KILLED = "killed"
    RESET = "reset"
    STALLED = "stalled"


@dataclass(slots=True)
class Fate:
    """The fate of one fleet's engines. The next streams each end after some events: `after` has a number for each. `asked`:
    the worker and the body of each request for tokens."""

    death: Death = Death.KILLED
    after: list[int] = field(default_factory=list)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    revived: asyncio.Event = field(default_factory=asyncio.Event)

    def revive(self) -> None:
        """Let stalled engines continue."""
        self.revived.set()
        self.revived = asyncio.Event()


class _Relay:
    def __init__(self, worker_id: str, url: str, fate: Fate) -> None:
        self._worker_id = worker_id
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._fate = fate
        self._stalled: asyncio.Event | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            engine, to_engine = await asyncio.open_connection(self._host, self._port)
            try:
                while await self._relay(reader, writer, engine, to_engine):
                    pass
            finally:
                to_engine.close()
        writer.close()

    async def close(self, server: asyncio.Server) -> None:
        """End all connections."""
        server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        engine: asyncio.StreamReader,
        to_engine: asyncio.StreamWriter,
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head))
        line = head.partition(b"\r\n")[0]
        generates = line.startswith((b"POST /v1/", b"POST /generate", b"POST /inference/")) and b"render" not in line
        if generates and b'"stream":true' in body.replace(b" ", b""):
            self._fate.asked.append((self._worker_id, body))
        if (
            line.startswith(b"POST ")
            and b"/tokenize" not in line
            and b"/render" not in line
            and self._stalled is not None
        ):
            await self._stalled.wait()
            self._stalled = None
        to_engine.write(head + body)
        answer = await engine.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if b"transfer-encoding: chunked" not in answer.lower():
            writer.write(await engine.readexactly(_length(answer)))
            return True
        after = self._fate.after.pop(0) if self._fate.after and b"event-stream" in answer else -1
        while after:
            after -= 1
            size = await engine.readuntil(b"\r\n")
            writer.write(size + await engine.readexactly(int(size, 16) + 2))
            await writer.drain()
            if int(size, 16) == 0:
                return True
        if self._fate.death is Death.ENDED:
            last = (await engine.readexactly(int(await engine.readuntil(b"\r\n"), 16) + 2)).rstrip()
            writer.write(b"%x\r\n%b\n\r\n0\r\n\r\n" % (len(last) + 1, last))
            return False
        if self._fate.death is Death.STALLED:
            self._stalled = self._fate.revived
            await self._stalled.wait()
            return await self._finish(writer, engine)
        if self._fate.death is Death.RESET:
            taken: socket.socket = writer.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False

    @staticmethod
    async def _finish(writer: asyncio.StreamWriter, engine: asyncio.StreamReader) -> bool:
        """Pass on the rest of a stalled answer."""
        while True:
            size = await engine.readuntil(b"\r\n")
            writer.write(size + await engine.readexactly(int(size, 16) + 2))
            if int(size, 16) == 0:
                return True


def _length(head: bytes) -> int:
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return next((int(value) for name, _, value in lines if name == b"content-length"), 0)


@asynccontextmanager
async def mortal_fleet(store: Store, workers: int = 3, **changed: Any) -> AsyncIterator[tuple[Fleet, Fate]]:
    """Engines that answer with text that any other can continue, until their fate lets one die."""
    settings = {"answers_text": True, "enable_scale_out": True, "num_gpu_blocks": 4_096, **changed}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            running_fleet(store, {f"w{number}": settings for number in range(workers)})
        )
        urls, fate = await stack.enter_async_context(mortal_engines(fleet.urls))
        for worker_id, url in urls.items():
            await fleet.report(worker_id, url)
        yield fleet, fate


@asynccontextmanager
async def mortal_engines(urls: Mapping[str, str]) -> AsyncIterator[tuple[Mapping[str, str], Fate]]:
    """Addresses of these engines by worker, with a fate."""
    fate, found = Fate(), dict[str, str]()
    async with AsyncExitStack() as stack:
        for worker_id, url in urls.items():
            relay = _Relay(worker_id, url, fate)
            server = await asyncio.start_server(relay.handle, "127.0.0.1", 0)
            stack.push_async_callback(relay.close, server)
            host, port = server.sockets[0].getsockname()[:2]
            found[worker_id] = f"http://{host}:{port}"
        yield found, fate
        fate.revive()


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    """The stream's bytes."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.content
