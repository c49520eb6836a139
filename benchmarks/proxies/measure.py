"""Measures what requests, chunks and open streams cost one proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

from benchmarks.proxies import bodies
from benchmarks.proxies.targets import Target
from kvatlas_router.upstream.engine_client import EngineClient

CONNECTIONS = 16
STREAMS = 32
SHORT, LONG = 64, 256
GAP_MS = 20
OPEN_STREAMS = 1_000
PATH = "/v1/chat/completions"
HEADERS = ((b"content-type", b"application/json"), (b"authorization", b"Bearer sk-bench"))


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that were answered, in all and per second, and the proxy's CPU time for each."""

    requests: int
    cpu_us: float
    a_second: float


async def ask(client: EngineClient, target: Target, body: bytes) -> int:
    """Send one request. Returns the length of its answer in bytes."""
    async with client.answering("POST", target.url + PATH, HEADERS, body) as answer:
        received = len(await answer.read_all())
        if answer.status != 200:
            raise RuntimeError(f"{target.name}: status {answer.status}")
        return received


async def saturate(client: EngineClient, target: Target, body: bytes, seconds: float, connections: int) -> Load:
    """Send requests on this many connections, each as soon as the previous one is answered."""
    count = 0
    began, before = perf_counter(), target.cpu_us()

    async def go_on() -> None:
        nonlocal count
        while perf_counter() - began < seconds:
            await ask(client, target, body)
            count += 1

    await asyncio.gather(*(go_on() for _ in range(connections)))
    return Load(count, (target.cpu_us() - before) / count, count / (perf_counter() - began))


async def chunk_us(client: EngineClient, target: Target, seconds: float) -> float:
    """CPU time of one event, from the difference between long and short streams."""
    found = []
    for events in (SHORT, LONG):
        body = bodies.small(stream=True, seed=GAP_MS).replace(b'"max_tokens": 16', b'"max_tokens": %d' % events)
        found.append((await saturate(client, target, body, seconds, STREAMS)).cpu_us)
    return (found[1] - found[0]) / (LONG - SHORT)


@asynccontextmanager
async def open_streams(client: EngineClient, target: Target, count: int) -> AsyncIterator[None]:
    """Open streams that get one event per minute."""
    body = bodies.small(stream=True, seed=60_000).replace(b'"max_tokens": 16', b'"max_tokens": 1000')
    answers = []
    try:
        for _ in range(count):
            answers.append(await client.send("POST", target.url + PATH, HEADERS, body))
        yield
    finally:
        for answer in answers:
            answer.close()
