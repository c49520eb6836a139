"""An engine that answers each POST with given bytes and hangs up, as no well-behaved one does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-engine: raw\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


@dataclass(slots=True)
class RawEngine:
    """`heads`: the request heads that it received."""

    url: str = ""
    heads: list[str] = field(default_factory=list)


@asynccontextmanager
async def raw_engine(answer: bytes) -> AsyncIterator[RawEngine]:
    engine = RawEngine()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if not head.startswith("POST "):
                return  # it lists no models
            engine.heads.append(head)
            length = next(
                int(line.partition(":")[2]) for line in head.splitlines() if line.lower().startswith("content-length")
            )
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()
        except asyncio.IncompleteReadError:
            return  # the client disconnected without a whole request
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield engine


@asynccontextmanager
async def silent_engine(first: bytes) -> AsyncIterator[RawEngine]:
    """An engine that answers each POST with these bytes and then nothing, keeps every connection open, and answers nothing
    else."""
    engine, over = RawEngine(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("POST "):
                engine.heads.append(head)
                writer.write(first)
                await writer.drain()
            await over.wait()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the proxy gave up
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield engine
        over.set()


async def read_cut(client: httpx.AsyncClient, path: str, body: object) -> bytes | None:
    """The bytes of an answer with status 200 before its connection is cut; None if it ends properly."""
    text = b""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        try:
            async for part in answer.aiter_raw():
                text += part
        except httpx.RemoteProtocolError:
            return text
    return None
