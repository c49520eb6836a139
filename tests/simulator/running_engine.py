"""A whole engine on free loopback ports, and a subscriber to its events that folds them as a publisher would."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import msgpack
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from kvatlas_simulator.service import EngineAddresses, run_engine
from kvatlas_simulator.settings import EngineSettings
from tests.eventually import until
from tests.http_client import http_client

FREE_PORT = "tcp://127.0.0.1:0"


def engine_settings(**changed: Any) -> EngineSettings:
    """A fast engine with blocks of 4 tokens."""
    values: dict[str, Any] = {
        "port": 0,
        "endpoint": FREE_PORT,
        "replay_endpoint": FREE_PORT,
        "speed_up": 1_000,
        "block_size": 4,
        "num_gpu_blocks": 64,
        "vocab_size": 32_000,
    }
    return EngineSettings.load(**{**values, **changed})


@asynccontextmanager
async def running_engine(
    wrap: Callable[[ASGIApp], ASGIApp] = lambda application: application, /, **changed: Any
) -> AsyncIterator[tuple[EngineAddresses, httpx.AsyncClient]]:
    """An engine that answers, and an HTTP client of it. `wrap`: see `run_engine`."""
    found: list[EngineAddresses] = []
    up = anyio.Event()

    def ready(addresses: EngineAddresses) -> None:
        found.append(addresses)
        up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_engine, engine_settings(**changed), ready, wrap)
        with anyio.fail_after(60):
            await up.wait()
        async with http_client(base_url=found[0].base_url, timeout=60) as client:
            yield found[0], client
        tasks.cancel_scope.cancel()


async def scrape_metrics(client: httpx.AsyncClient) -> dict[str, tuple[float, dict[str, str]]]:
    """(value, labels) of each sample on the metrics page, by name."""
    response = await client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def wait_for_requests(client: httpx.AsyncClient, *, running: int, waiting: int = 0) -> None:
    """Wait until the engine has exactly this many requests."""

    async def counts_match() -> bool:
        found = await scrape_metrics(client)
        return (found["vllm:num_requests_running"][0], found["vllm:num_requests_waiting"][0]) == (running, waiting)

    await until(counts_match, what=f"{running} running and {waiting} waiting requests")


@dataclass(slots=True)
class Batch:
    topic: bytes
    seq: int
    payload: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        ts, events, rank = msgpack.unpackb(self.payload)
        assert isinstance(ts, float) and rank == 0
        return list(events)


@dataclass(slots=True)
class Listener:
    """Folds batches into counts by (hash, medium)."""

    subscription: zmq.asyncio.Socket
    batches: list[Batch] = field(default_factory=list)
    copies: Counter[tuple[int, str]] = field(default_factory=Counter)

    async def next_batch(self) -> Batch:
        with anyio.fail_after(60):
            topic, seq, payload = await self.subscription.recv_multipart()
        batch = Batch(topic, int.from_bytes(seq, "big"), payload)
        assert len(seq) == 8
        self.batches.append(batch)
        fold(self.copies, batch)
        return batch


def fold(copies: Counter[tuple[int, str]], batch: Batch) -> None:
    for event in batch.events:
        match event["type"]:
            case "BlockStored":
                copies.update((block_hash, event["medium"]) for block_hash in event["block_hashes"])
            case "BlockRemoved":
                copies.subtract((block_hash, event["medium"]) for block_hash in event["block_hashes"])
            case "AllBlocksCleared":
                for key in [key for key in copies if key[1] == "GPU"]:
                    del copies[key]
    assert not [key for key, count in copies.items() if count < 0]
    for key in [key for key, count in copies.items() if not count]:
        del copies[key]


@asynccontextmanager
async def listening(addresses: EngineAddresses, client: httpx.AsyncClient) -> AsyncIterator[Listener]:
    """A subscriber that is connected: it has received the events of a cleared cache."""
    assert addresses.replay_endpoint is not None
    context = zmq.asyncio.Context()
    subscription = context.socket(zmq.SUB)
    try:
        subscription.connect(addresses.endpoint)
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        with anyio.fail_after(60):
            while True:
                assert (await client.post("/reset_prefix_cache")).status_code == 200
                if await subscription.poll(50):
                    break
            last = (await replayed(addresses.replay_endpoint, 0))[-1].seq
            while int.from_bytes((await subscription.recv_multipart())[1], "big") < last:
                pass
        yield Listener(subscription)
    finally:
        subscription.close(linger=0)
        context.term()


async def replayed(endpoint: str, first_seq: int) -> list[Batch]:
    """The batches that the replay socket sends, up to the end marker."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    batches: list[Batch] = []
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart((b"", first_seq.to_bytes(8, "big")))
        with anyio.fail_after(60):
            while True:
                empty, topic, seq, payload = await dealer.recv_multipart()
                assert empty == b""
                if seq == b"\xff" * 8:
                    assert topic == payload == b""
                    return batches
                batches.append(Batch(topic, int.from_bytes(seq, "big"), payload))
    finally:
        dealer.close(linger=0)
        context.term()
